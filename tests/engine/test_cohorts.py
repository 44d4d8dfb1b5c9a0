"""The same run over every cohort: the same requests, the same charges, the same releases, the same files."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from functools import reduce
from operator import add

import pytest
import torch
from flwr.app import ArrayRecord
from flwr.clientapp import ClientApp
from torch import nn

from dpfedexp import Evaluation, Federation, Sgd, cdp_fedexp, dp_fedavg, ldp_fedexp
from dpfedexp.accounting import Ledger
from dpfedexp.algorithms.algorithm import with_aggregation
from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import Streams
from dpfedexp.engine.engine import Answer, Cohort
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.run import RunFacts, read_history
from dpfedexp.engine.simulated import Simulation
from dpfedexp.engine.train import train
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.flower import DpFedExp, answer, cohort, private_training, strategy_from
from dpfedexp.flower.app_settings import read_candidates, read_settings
from dpfedexp.models import linear_regression
from tests.flower.loopback import LoopbackGrid, Silence, dying_at
from tests.sizes import long

M, D, ROUNDS, EVERY = 17, 6, 3, 2  # 15 clients measure: half of an odd number is between two clients
HELD_OUT, EPSILON = 0.2, 900.0  # so few clients at a small epsilon measure nothing but noise
AUTO = Sgd(lr="auto", steps=5, max_examples=64)
MEASURING = {"evaluate": "numbers", "evaluate_every": EVERY}
FILES = {
    *("advice.jsonl", "checkpoint.safetensors", "ledger.jsonl", "ledger.jsonl.head", "metrics.csv", "metrics.jsonl"),
    *("model.safetensors", "privacy.json", "privacy.txt", "run.json", "status.json"),
}
ALGORITHMS = {
    "fit": (cdp_fedexp(clip="adaptive", target_epsilon=EPSILON), AUTO),
    "fixed rate": (dp_fedavg(clip=0.5, noise_multiplier=1.0), Sgd(lr=0.05, steps=5)),
    "local": (ldp_fedexp(clip=0.5, noise_multiplier=1.0), Sgd(lr=0.05, steps=5)),
}


def problem(clients=M):
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(clients, 8, D, generator=draw)
    y = x @ torch.linspace(1.0, -1.0, D) + 0.3 * torch.randn(clients, 8, generator=draw)
    model = linear_regression(D)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-0.5, 0.5, D).view_as(p))
    # Two clients have too few rows to hold some out: they train, and measure nothing.
    sizes = [1, 2, *[8] * (clients - 2)]
    return Federation.from_clients([(a[:n], b[:n]) for a, b, n in zip(x, y, sizes, strict=True)]), model


class OneByOne(Cohort):
    """A transport of one's own: every client of the simulation computes its row and its votes alone."""

    def __init__(self, simulation):
        self.simulation = simulation

    def answer(self, request):
        return Answer(reduce(add, (self.sums_of(request, torch.tensor([number])) for number in range(M))))

    def sums_of(self, request, client):
        mechanism, row = request.mechanism, self.simulation.rows(request, request.state.w.float(), client)
        ballots = self.simulation.improved(client, row) if request.purpose == UPDATE else None
        noise = Streams(0).at("local noise", request.round)
        return mechanism.collect(mechanism.randomize(clip(row, mechanism.clip), client, noise, ballots=ballots))


def simulated(algorithm, local, cohort=lambda simulation: simulation):
    """A whole run of an engine without files."""
    federation, model = problem()
    engine, _ = prepare(model, federation, algorithm, local=local, rounds=ROUNDS, evaluate_every=EVERY)
    engine, ledger, measured = replace(engine, cohort=cohort(engine.cohort)), Ledger.in_memory(), {}
    state = engine.begin()
    for _ in range(ROUNDS):
        state, _ = engine.step(engine.choose(state, ledger), ledger)
        measured |= engine.evaluate(state, ledger) or {}
    return state, measured, charges(ledger)


def flower_app(federation, model, local):
    app = ClientApp()

    @app.train(mods=[private_training])
    def run(message, context):
        rows = federation.client(context.node_config["partition-id"])
        return answer(message, context, linear_regression(D), rows, local=local)

    return app


def announced(algorithm):
    """What the run's configuration would say, for nodes without a guard."""
    run = {"clients": M, "rounds": ROUNDS, "folder": "x", "epsilon": EPSILON, "held_out": HELD_OUT, **MEASURING}
    config = {f"federation.{name}": value for name, value in run.items()}
    return {**config, "algorithm.clip": "adaptive", "algorithm.delta": algorithm.delta}


def flower(algorithm, local, folder, noise=Silence, **options):
    federation, model = problem()
    config = announced(algorithm) if local.automatic else {}
    grid = LoopbackGrid(flower_app(federation, model, local), M, run_config=config)
    measuring = MEASURING if local.automatic else {}
    given = {"clients": M, "rounds": ROUNDS, "folder": folder, "local": local, "noise": noise, "node_timeout": 1}
    strategy = DpFedExp(algorithm, **given, **options, **measuring)
    strategy.start(grid, ArrayRecord(model.state_dict()), timeout=5)
    return strategy


def charges(ledger):
    return [(entry.round, [query.name for query in entry.event.queries]) for entry in ledger.entries]


@pytest.mark.parametrize("name", ["fit", "fixed rate"])
def test_a_cohort_of_ones_own_gives_the_same_charges_and_bits(name):
    ours, measured, charged = simulated(*ALGORITHMS[name])
    theirs, by_them, charged_by_them = simulated(*ALGORITHMS[name], OneByOne)
    assert charged == charged_by_them
    assert by_them == pytest.approx(measured, rel=1e-5)
    # Chunks of all clients and of one round their local steps in their own way.
    torch.testing.assert_close(theirs.w, ours.w, rtol=1e-5, atol=1e-6)
    assert theirs.radius == pytest.approx(ours.radius, rel=1e-5)


def check_same_run(strategy, run, folder, fields, rel):
    """A deployment and a simulated run have the same charges, fields of a record and files, and both hold."""
    assert charges(strategy.opened.ledger) == charges(run.ledger)
    for ours, theirs in zip(strategy.history, run.history, strict=True):
        common = {name: theirs[name] for name in fields if name in theirs}
        assert {name: ours[name] for name in fields if name in ours} == pytest.approx(common, rel=rel)
    for place in (folder / "flower", folder / "simulated"):
        assert outcome(verify_run(place)) == "holds"
        assert {path.name for path in place.iterdir()} == FILES
        assert json.loads((place / "status.json").read_text())["status"] == "completed"
        assert RunFacts.read(place).rounds == len(read_history(place)) == len(run.history)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_flower_asks_charges_and_writes_what_the_simulator_does(name, tmp_path, monkeypatch):
    """Without noise the choices are the same, and the models agree to the lattice of secure noise."""
    algorithm, local = ALGORITHMS[name]
    silence(monkeypatch)
    federation, model = problem()
    given = {"local": local, "rounds": ROUNDS, "out": tmp_path / "simulated"}
    if local.automatic:
        given |= {"evaluate": Evaluation("clients", every=EVERY, held_out=HELD_OUT)}
    run = train(model, federation, algorithm, **given)
    strategy = flower(algorithm, local, tmp_path / "flower")
    check_same_run(strategy, run, tmp_path, ("clip", "local_rate", "epsilon_total"), rel=1e-3)
    # Noise of known size is in the intervals also where none was drawn. A bin of the histogram is 2.3%.
    for ours, theirs in zip(strategy.history, run.history, strict=True):
        measured = [{k: v for k, v in line.items() if k.startswith("clients_")} for line in (ours, theirs)]
        assert measured[0] == pytest.approx(measured[1], rel=0.025)
        assert bool(measured[0]) == (local.automatic and ours["round"] in (2, 3))
    start, ended = (torch.cat([p.detach().flatten() for p in one.parameters()]).double() for one in (model, run.model))
    moved, expected = strategy.state.w - start, ended - start
    assert float(expected.norm()) > 0.01
    if name != "local":
        assert float(torch.cosine_similarity(moved, expected, dim=0)) > 0.99


def silence(monkeypatch):
    """No noise anywhere, in the simulator and on the nodes."""
    from dpfedexp.core.noise import KeyedNoise
    from dpfedexp.flower import client

    def at(self, purpose, round):
        return Silence() if "noise" in purpose else KeyedNoise(self.seed, purpose, round)

    monkeypatch.setattr("dpfedexp.core.noise.Streams.at", at)
    monkeypatch.setattr(client, "ChaChaNoise", Silence)


CANDIDATES = {
    "candidates.net.model": "network",
    "candidates.net.local.steps": 5,
    "candidates.plain.rate": 1.0,
    "candidates.faster.rate": 3.0,
}
PHASES = [3, 2, 1, 1]
"""How many candidates are left in each of four rounds."""


def networks():
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(D, 3), nn.Tanh(), nn.Linear(3, 1), nn.Flatten(0))
    return {"linear": problem()[1], "network": network}


def tournament_config(folder, **more):
    """What the app's pyproject.toml says; Flower hands sections over in any order."""
    config = {"clients": M, "rounds": len(PHASES), "epsilon": EPSILON, "folder": str(folder), "node_timeout": 1.0}
    return {**CANDIDATES, **{f"federation.{name}": value for name, value in config.items()}, **more}


def tournament_grid(config, more=0, answer=answer, **options):
    """The nodes of a configuration, with the app's models, and `more` nodes that have other tasks."""
    federation, app = problem(config["federation.clients"])[0], ClientApp()
    each = config.get("federation.clients_per_node", 1)

    @app.train(mods=[private_training])
    def run(message, context):
        first = context.node_config["partition-id"] * each
        many = [federation.client(first + number) for number in range(each)]
        rows = many[0] if each == 1 else Federation.from_clients(many)
        return answer(message, context, networks(), rows)

    return LoopbackGrid(app, config["federation.clients"] // each + more, run_config=config, **options)


def play(config, grid=None, timeout=5, **changes):
    """A whole deployment with candidates; `changes` are attributes of the strategy."""
    strategy = strategy_from(config)
    vars(strategy).update(changes)
    start = {name: ArrayRecord(model.state_dict()) for name, model in networks().items()}
    strategy.start(grid or tournament_grid(config), start, timeout=timeout)
    return strategy


FEW = 9


def test_a_tournament_on_flower_is_that_of_the_simulator(tmp_path, monkeypatch):
    """With the same groups and without noise: the same charges, choices, winner, model and files."""
    silence(monkeypatch)
    monkeypatch.setattr(Simulation, "groups", lambda self, request, groups: torch.arange(FEW) % groups)

    def choose(nodes, clients_per_node, sampling, groups, equal):
        assert equal
        return [dict.fromkeys(sorted(nodes)[place::groups], (0,)) for place in range(groups)]

    monkeypatch.setattr(cohort, "choose", choose)
    config = tournament_config(tmp_path / "flower", **{"federation.clients": FEW})
    strategy = play(config, noise=Silence)
    models, named = networks(), read_candidates(config)
    assert [one.name for one in named] == ["net", "plain", "faster"]
    candidates = [replace(one, model=None if one.model is None else models[one.model]) for one in named]
    settings = read_settings(config)[1]
    given = {"local": settings.build_local(), "rounds": len(PHASES), "out": tmp_path / "simulated"}
    run = train(models["linear"], problem(FEW)[0], settings.build_algorithm(), candidates=candidates, **given)
    fields = ("candidate", "candidates", "clip", "local_rate", "epsilon_total")
    check_same_run(strategy, run, tmp_path, fields, rel=1e-2)
    votes = ["local rate", "first clip"] * 2
    assert [query for number, (query, *_) in charges(run.ledger) if number == 0] == votes
    assert [(line["asked"], line["valid"]) for line in strategy.history] == [(FEW, FEW)] * len(PHASES)
    assert [line["candidates"] for line in run.history] == PHASES
    ended = torch.cat([p.detach().flatten() for p in run.model.parameters()]).double()
    reported = torch.cat([p.flatten() for p in strategy.run.model.state_dict().values()]).double()
    assert float((reported - ended).norm()) < 0.02 * float(ended.norm())
    books = [Ledger.open(tmp_path / folder / "ledger.jsonl", read_only=True) for folder in ("flower", "simulated")]
    assert [[vote["rounds"] for vote in book.header["votes"]] for book in books] == [[[1, 1], [1, 2]]] * 2
    assert f"of 3 candidates, by the clients' votes: {named[strategy.history[-1]['candidate']].name}" in " ".join(
        strategy.statement.choices
    )


@pytest.mark.parametrize("aggregation", ["two-party", "two-party-one-sided"])
def test_two_aggregators_in_one_process_vote_on_the_rate(aggregation):
    algorithm, local = ALGORITHMS["fit"]
    state, _, charged = simulated(with_aggregation(algorithm, aggregation), local)
    assert charged[:2] == [(0, ["local rate"]), (0, ["first clip"])]
    assert (3, ["evaluation"]) in charged
    assert state.round == ROUNDS


@long
def test_a_deployed_fit_that_dies_at_any_write_releases_nothing_uncharged_and_goes_on(tmp_path, monkeypatch):
    """Every third write to disk of two votes, three rounds and their evaluations in turn is the last one that happens."""
    algorithm, local = ALGORITHMS["fit"]
    for write in itertools.count(1, 3):
        place, shown = tmp_path / str(write), []
        with dying_at(write, monkeypatch) as left:
            flower(algorithm, local, place, on_round=lambda record, shown=shown: shown.append(record["round"]))
        if left[0] > 0:
            break
        path = place / "ledger.jsonl"
        entries = Ledger.open(path, read_only=True).entries if path.exists() else ()
        assert {entry.round for entry in entries} >= set(shown)
        resumed = flower(algorithm, local, place)
        assert resumed.state.round == ROUNDS
        names = [query for _, queries in charges(resumed.run.ledger) for query in queries]
        assert {"local rate", "first clip"} <= set(names)
        assert outcome(verify_run(place)) == "holds"
    assert write > 15, "two votes and three rounds, each with a head and an anchor"
