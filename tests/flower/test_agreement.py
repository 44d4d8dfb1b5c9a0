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
from dpfedexp.core.noise import Streams
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.train import train
from dpfedexp.flower import DpFedExp, answer, private_training
from tests.optimizers import Adagrad
from tests.sizes import long, sized

from ..engine.test_cohorts import silence
from .loopback import LOCAL, LoopbackGrid, Silence, deploy, flat, grid_of, plain_app, problem

SMALL = 1e-4
"""The grid of secure noise is a millionth of the noise: at this size it is finer than float32, as a comparison needs."""

ALGORITHMS = {
    "fedexp": fedexp(),
    "cdp free": cdp_fedexp(clip=0.5, noise_multiplier=SMALL),
    "cdp paper": cdp_fedexp(clip=0.5, numerator="paper", noise_multiplier=SMALL),
    "cdp adaptive, adagrad": replace(cdp_fedexp(clip="adaptive", noise_multiplier=SMALL), server=Adagrad(floor=0.5)),
    "dp_fedavg": dp_fedavg(clip=0.5, noise_multiplier=SMALL, server_rate=0.7),
    "ldp paper": ldp_fedexp(clip=0.5, noise_multiplier=SMALL, numerator="paper"),
    "dp_scaffold": dp_scaffold(clip=0.5, noise_multiplier=SMALL),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_six_rounds_equal_the_simulators_without_noise(name, tmp_path, monkeypatch):
    silence(monkeypatch)
    federation, model = problem()
    announced = {"algorithm.name": "fedexp", "federation.clients": 6, "federation.rounds": 6, "federation.folder": "x"}
    # Updates without noise leave a node only if the run's configuration says so.
    grid = grid_of(6, run_config=announced if name == "fedexp" else {})
    _, result = deploy(tmp_path, ALGORITHMS[name], grid, clients=6, rounds=6, noise=Silence)
    run = train(model, federation, ALGORITHMS[name], local=LOCAL, rounds=6)
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


def test_the_quantile_settles_to_what_the_simulator_settles_it_to(tmp_path):
    (federation, model), algorithm = problem(3), cdp_fedexp(clip="adaptive", noise_multiplier=1.0)
    engine = deploy(tmp_path, algorithm)[0].opened.description.engine
    simulation, _ = prepare(model, federation, algorithm, local=LOCAL, rounds=1)
    # The grid of secure noise adds a millionth to it.
    assert engine.algorithm.clip.quantile == pytest.approx(simulation.algorithm.clip.quantile, rel=1e-5)
    assert engine.algorithm.clip.quantile != 0.5


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
    given, hosts = {"clients": 6, "noise": Silence}, LoopbackGrid(hosting_app(*problem()), 2)
    alone, _ = deploy(tmp_path / "single", ALGORITHMS[name], **given)
    together, result = deploy(tmp_path / "hosts", ALGORITHMS[name], hosts, clients_per_node=3, **given)
    assert result.train_metrics_clientapp[1]["valid"] == 6
    torch.testing.assert_close(together.state.w, alone.state.w, rtol=2e-5, atol=2e-6)
    for one in (together, alone):
        assert ("against its operator: the node sees their reports" in one.statement.text) is (one is together)


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
def test_noisy_rounds_have_the_simulators_distribution(algorithm, tmp_path):
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
    monkeypatch.setattr("dpfedexp.flower.cohort.choose", lambda nodes, *_, equal: [{node: [0] for node in nodes}])
    given = {"algorithm": dp_fedavg(clip=0.5, noise_multiplier=1.0), "clients": 4, "noise": Silence}
    full, _ = deploy(tmp_path / "full", **given)
    half, result = deploy(tmp_path / "half", **given, participation=Poisson(0.5))
    start = flat(problem(4)[1]).double()
    torch.testing.assert_close(half.state.w - start, 2 * (full.state.w - start))
    assert "valid" not in result.train_metrics_clientapp[1], "how many came is private under Poisson sampling"
