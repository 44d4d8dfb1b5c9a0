"""A round through Flower is a round of the simulator: the same numbers without noise, the same distribution with it."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from flwr.clientapp import ClientApp
from scipy.stats import ks_2samp

from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import cdp_fedexp, dp_fedavg, dp_scaffold, fedexp, ldp_fedexp
from dpfedexp.algorithms.round import Poisson
from dpfedexp.core.noise import KeyedNoise, Streams
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.train import train
from dpfedexp.flower import DpFedExp, answer, private_training
from dpfedexp.flower import client as mod
from tests.optimizers import Adagrad
from tests.sizes import long, sized

from .loopback import LOCAL, LoopbackGrid, Silence, flat, plain_app, problem


def flower_run(folder, algorithm, federation, model, rounds=1, grid=None, **options):
    grid = grid or LoopbackGrid(plain_app(federation, model), len(federation))
    given = {"rounds": rounds, "folder": folder, "node_timeout": 1, "local": LOCAL, **options}
    strategy = DpFedExp(algorithm, clients=len(federation), **given)
    return strategy, strategy.start(grid, ArrayRecord(model.state_dict()), timeout=5)


def silent_streams(monkeypatch, noise=Silence) -> None:
    """The simulator draws what `noise` draws in the place of noise."""

    def at(self, purpose, round):
        return noise() if "noise" in purpose else KeyedNoise(self.seed, purpose, round)

    monkeypatch.setattr("dpfedexp.core.noise.Streams.at", at)


SMALL = 1e-4
"""The grid of secure noise is a millionth of the noise: at this size it is finer than float32, as a comparison needs."""

ALGORITHMS = {
    "fedexp": fedexp(),
    "cdp free": cdp_fedexp(clip=0.5, noise_multiplier=SMALL),
    "cdp paper": cdp_fedexp(clip=0.5, numerator="paper", noise_multiplier=SMALL),
    "cdp adagrad": replace(cdp_fedexp(clip=0.5, noise_multiplier=SMALL), server=Adagrad(floor=0.5)),
    "cdp adaptive": cdp_fedexp(clip="adaptive", noise_multiplier=SMALL),
    "dp_fedavg": dp_fedavg(clip=0.5, noise_multiplier=SMALL, server_rate=0.7),
    "ldp paper": ldp_fedexp(clip=0.5, noise_multiplier=SMALL, numerator="paper"),
    "ldp privunit": ldp_fedexp(clip=0.5, mechanism="privunit"),
    "dp_scaffold": dp_scaffold(clip=0.5, noise_multiplier=SMALL),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_six_rounds_equal_the_simulators_without_noise(name, tmp_path, monkeypatch):
    federation, model = problem()
    algorithm, noise = ALGORITHMS[name], Silence
    if name == "ldp privunit":
        # Without noise PrivUnit has no direction to orthogonalise: fixed draws, the same on both sides, take its place.
        noise = Fixed
        # Its reports are rounded to a coarse grid in a deployment, which the test of the distribution covers.
        monkeypatch.setattr("dpfedexp.flower.messages.with_secure_noise", lambda mechanism: mechanism)
        monkeypatch.setattr("dpfedexp.mechanisms.PrivUnit.secure", lambda mechanism, strict=False: mechanism)
        monkeypatch.setattr("dpfedexp.mechanisms.PrivUnit.noise_kind", True)
    monkeypatch.setattr(mod, "ChaChaNoise", noise)
    announced = {"algorithm.name": "fedexp", "federation.clients": 6, "federation.rounds": 6, "federation.folder": "x"}
    # Updates without noise leave a node only if the run's configuration says so.
    grid = LoopbackGrid(plain_app(federation, model), 6, run_config=announced if name.startswith("fedexp") else {})
    _, result = flower_run(tmp_path, algorithm, federation, model, rounds=6, noise=noise, grid=grid)
    silent_streams(monkeypatch, noise)
    run = train(model, federation, algorithm, local=LOCAL, rounds=6)
    ours = torch.cat([torch.from_numpy(a.numpy()).flatten() for a in result.arrays.values()])
    theirs = flat(run.model)
    assert float((theirs - flat(model)).norm()) > 1e-2, "the round must move the model"
    # Two float32 programs of a few dozen operations each: 1e-5 of the numbers' size is far above their rounding.
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
    for number, line in enumerate(run.history, start=1):
        metrics = result.train_metrics_clientapp[number]
        assert metrics["eta_g"] == pytest.approx(line["eta_g"], rel=1e-4)
        assert metrics["clip"] == pytest.approx(line["clip"], rel=1e-5)
        # The paper's scalar costs 2⁻¹⁹ more in μ on the grid of secure noise; everything else costs the same.
        assert metrics["epsilon_total"] == pytest.approx(line["epsilon_total"], rel=1e-5)


class Fixed:
    def normal(self, clients, width, device, dtype):
        row = torch.from_numpy(np.random.default_rng(5).standard_normal(width))
        return row.expand(len(clients), -1).to(device, dtype)

    def uniform(self, clients, width):
        return torch.from_numpy(np.random.default_rng(6).random(width)).expand(len(clients), -1)


def hosting_app(federation, model) -> ClientApp:
    """A node of three clients."""
    app = ClientApp()

    @app.train(mods=[private_training])
    def run(message, context):
        first = 3 * context.node_config["partition-id"]
        own = type(federation).from_clients([federation.client(c) for c in range(first, first + 3)])
        return answer(message, context, copy.deepcopy(model), own, local=LOCAL)

    return app


@pytest.mark.parametrize("name", ["cdp free", "ldp paper"])
def test_nodes_that_host_many_clients_give_the_same_round(name, tmp_path, silent):
    federation, model = problem(clients=6)
    algorithm = ALGORITHMS[name]
    alone, single = flower_run(tmp_path / "single", algorithm, federation, model, noise=Silence)
    given = {"noise": Silence, "grid": LoopbackGrid(hosting_app(federation, model), 2), "clients_per_node": 3}
    strategy, cohort = flower_run(tmp_path / "cohort", algorithm, federation, model, **given)
    assert cohort.train_metrics_clientapp[1]["valid"] == 6
    for name_, array in single.arrays.items():
        np.testing.assert_allclose(cohort.arrays[name_].numpy(), array.numpy(), rtol=2e-5, atol=2e-6)
    for one in (strategy, alone):
        assert ("against its operator: the node sees their reports" in one.statement.text) is (one is strategy)


ROUNDS = sized(60, 200)


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(cdp_fedexp(clip=0.5, noise_multiplier=1.0), marks=long),
        cdp_fedexp(clip=0.5, numerator="paper", noise_multiplier=1.0),
        pytest.param(ldp_fedexp(clip=0.5, noise_multiplier=0.7), marks=long),
        ldp_fedexp(clip=0.5, mechanism="privunit"),
    ],
    ids=["cdp free", "cdp paper", "ldp gaussian", "ldp privunit"],
)
def test_noisy_rounds_have_the_simulators_distribution(algorithm, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda fd: None)
    federation, model = problem(clients=3, dimension=40)
    grid = LoopbackGrid(plain_app(federation, model), 3, serialize=False)
    strategy = DpFedExp(algorithm, clients=3, rounds=ROUNDS, folder=tmp_path, node_timeout=1)
    engine = strategy.engine(grid, ArrayRecord(model.state_dict()), 1.0, ConfigRecord())
    simulation, _ = prepare(model, federation, algorithm, local=LOCAL, rounds=1, execution="cpu")
    ours, theirs, start, before = [], [], engine.begin(), simulation.begin()
    for seed in range(ROUNDS):
        after, shown = engine.step(start, Ledger.in_memory())
        ours.append(_shown(after.w - start.w, shown.eta_g))
        streams = Streams(seed)
        cohort = replace(simulation.cohort, streams=streams)
        after, shown = replace(simulation, cohort=cohort, noise=streams).step(before, Ledger.in_memory())
        theirs.append(_shown(after.w - before.w, shown.eta_g))
    for ours_, theirs_ in zip(np.array(ours).T, np.array(theirs).T, strict=True):
        # Fails by chance once in ten million comparisons; the test below shows what it would find.
        assert ks_2samp(ours_, theirs_).pvalue > 1e-7
    assert len({tuple(row) for row in ours}) == ROUNDS, "no two rounds may share their noise"


def _shown(move: torch.Tensor, eta_g: float) -> tuple[float, ...]:
    c_bar = move / eta_g
    probe = torch.linspace(-1, 1, len(c_bar), dtype=c_bar.dtype)
    return float(c_bar.norm()), float(c_bar @ probe), float(c_bar[0]), eta_g


def test_poisson_rounds_divide_by_the_public_cohort(tmp_path, monkeypatch, silent):
    """With every client drawn by chance, the sum is still divided by rate·clients: η_g c̄ doubles when all come at rate ½."""
    federation, model = problem(clients=4)
    monkeypatch.setattr("dpfedexp.flower.cohort.choose", lambda nodes, *_, equal: [{node: [0] for node in nodes}])
    algorithm = dp_fedavg(clip=0.5, noise_multiplier=1.0)
    full, _ = flower_run(tmp_path / "full", algorithm, federation, model, noise=Silence)
    given = {"noise": Silence, "participation": Poisson(0.5)}
    half, result = flower_run(tmp_path / "half", algorithm, federation, model, **given)
    start = flat(model).double()
    torch.testing.assert_close(half.state.w - start, 2 * (full.state.w - start))
    assert "valid" not in result.train_metrics_clientapp[1], "how many came is private under Poisson sampling"
