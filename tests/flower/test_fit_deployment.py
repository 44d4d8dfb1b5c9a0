"""`fit` on ten real nodes with TLS and with files of their own, against `fit` on one machine for the same clients.

The app says `epsilon = 8` and nothing else about training. Both runs charge the same, both choose what the noise of the votes
explains, and what the clients measure of the model is true."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dpfedexp import Evaluation, Federation, Run, fit
from dpfedexp.algorithms.probe import CLIP, RATE
from dpfedexp.config import parse
from dpfedexp.core.client_metrics import NORMAL_95
from dpfedexp.core.local_rate import PRIOR_RATE, clip_from_votes, first_rate, rate_from_votes
from dpfedexp.core.sums import MAX_SHARE
from dpfedexp.engine.engine import BEFORE, LOCAL_RATE, Engine, Request
from dpfedexp.engine.fit import fit_settings
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.flower.local_deployment import Deployment
from tests.sizes import long

from .app_folder import PATIENCE, QUICK, make_app, run_app

NODES, EACH, ROWS, ROUNDS, HELD_OUT = 10, 20, 20, 2, 0.25
DRAWS, DEVIATIONS = 400, 6.0
"""Choices that the votes' noise would lead to, drawn in the test, and how many of their standard deviations a choice may be off."""
TASK = """
import numpy as np
import torch
from torch import nn

from dpfedexp import Federation

LOSS = None


def build_model() -> nn.Module:
    model = nn.Linear(4, 2)
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


def load_data(path: str) -> Federation:
    rows = np.loadtxt(path, delimiter=",", skiprows=1)
    x, y = torch.from_numpy(rows[:, 1:-1]).float(), torch.from_numpy(rows[:, -1]).long()
    {returned}


def test_set() -> None:
    return None
"""
RETURNED = {"many": "return Federation.from_arrays(x, y, client_ids=rows[:, 0].astype(int))", "one": "return x, y"}


def write_data(folder: Path) -> list[Path]:
    """A file for every node: a column with the client's name, four features, and a label that depends on them."""
    draw, paths = np.random.default_rng(11), []
    for node in range(NODES):
        shift = 0.3 * draw.normal(size=(EACH, 1, 4))
        # Small numbers: the right rate is far above the usual 0.1.
        x = 0.2 * (draw.normal(size=(EACH, ROWS, 4)) + shift)
        y = draw.random((EACH, ROWS)) < 1 / (1 + np.exp(-(x @ [10.0, -7.5, 5.0, 0.0] + 0.5)))
        names = np.repeat(np.arange(EACH)[:, None], ROWS, 1)
        rows = np.concatenate([names[..., None], x, y[..., None]], axis=2).reshape(-1, 6)
        paths.append(folder / f"site{node}.csv")
        np.savetxt(paths[-1], rows, delimiter=",", header="client,a,b,c,d,y", comments="", fmt="%.9g")
    return paths


@dataclass(frozen=True)
class Votes:
    """What the clients of a federation vote without noise, and what noise their votes get in a run."""

    engine: Engine

    @staticmethod
    def of(model: nn.Module, clients: Federation) -> Votes:
        settings = parse(fit_settings(8.0, len(clients)))
        training, _ = clients.hold_out(HELD_OUT)
        given = {"local": settings.build_local(), "rounds": ROUNDS, "secure": True, "evaluate_every": 1}
        engine, _ = prepare(model, training, settings.build_algorithm(), **given)
        return Votes(engine)

    def drawn(self, purpose: str, rate: float) -> tuple[float, float]:
        """The decimal logarithm of what is chosen, as the votes' noise makes it: mean and standard deviation."""
        engine, start = self.engine, self.engine.begin()
        state = replace(start, memory={**start.memory, LOCAL_RATE: torch.tensor(rate, dtype=torch.float64)})
        mechanism = engine.probe.mechanisms[purpose]
        sums = engine.cohort.answer(Request(purpose, BEFORE, state, mechanism)).sums.vector.cpu()
        deviation = math.sqrt(mechanism.noise_variance(engine.expected, engine.expected)) / MAX_SHARE
        draw, shares = torch.Generator().manual_seed(3), sums / engine.expected / MAX_SHARE

        def choice(shares: Tensor) -> float:
            if purpose == CLIP:
                return math.log10(clip_from_votes(shares, deviation))
            noise_share = engine.mechanism.noise_share(len(start.w), engine.expected)
            return math.log10(first_rate(rate_from_votes(shares, deviation), noise_share))

        found = [choice(shares + deviation * torch.randn(len(shares), generator=draw)) for _ in range(DRAWS)]
        return float(np.mean(found)), float(np.std(found))

    def explain(self, history: list[dict]) -> None:
        """Asserts that the noise of the votes explains a run's first rate, and its first clip at that rate."""
        rate = history[0]["local_rate"]
        for purpose, value in ((RATE, rate), (CLIP, history[0]["clip"])):
            mean, deviation = self.drawn(purpose, rate)
            assert abs(math.log10(value) - mean) <= DEVIATIONS * deviation, (purpose, value, mean, deviation)


def measured(model: nn.Module, clients: Federation) -> dict[str, float]:
    """The true values on the rows that all clients hold out; all clients have equally many, so each row counts the same."""
    _, held = clients.hold_out(HELD_OUT)
    rows = [held.client(number) for number in range(len(held))]
    x, y = (torch.cat(part) for part in zip(*rows, strict=True))
    with torch.no_grad():
        scores = model(x)
    losses = nn.functional.cross_entropy(scores, y, reduction="none")
    bound = 2 * math.log(2)
    return {"loss": float(losses.clamp_max(bound).mean()), "accuracy": float((scores.argmax(1) == y).float().mean())}


def check_measurements(run: Run, model: nn.Module, clients: Federation) -> None:
    """Each metric of the last round is within its interval, widened from 1.96 to 5.5 standard deviations, of the true value."""
    last = run.history[-1]
    for name, true in measured(model, clients).items():
        low, value, high = (last[f"clients_{name}{end}"] for end in ("_low", "", "_high"))
        half = max(value - low, high - value)
        assert half < 0.35, "an interval that means something"
        assert abs(value - true) <= 5.5 / NORMAL_95 * half, (name, true, low, value, high)


def charged(run: Run) -> list:
    return [(entry.round, entry.event) for entry in run.ledger.entries]


@long
@pytest.mark.usefixtures("alone")
def test_ten_nodes_choose_what_one_machine_chooses_for_the_same_clients(tmp_path):
    """Once with 20 clients in the file of every node, enough for votes and measurements that stand out of the noise. Once with one
    client to a node: these are too few for either, so the prior chooses the rate, and there is no measurement."""
    files = write_data(tmp_path)
    data = {number: {"data": str(path)} for number, path in enumerate(files)}
    own = {**QUICK, "DPFEDEXP_PRIVATE": str(tmp_path / "state")}
    with Deployment(tmp_path / "up", NODES, node_config=data, environment=own) as deployment:
        for kind, each in (("many", EACH), ("one", 1)):
            task: dict = {}
            text = TASK.format(returned=RETURNED[kind])
            exec(text, task)
            held = [task["load_data"](path) for path in files]
            rows = held if kind == "one" else [one.client(number) for one in held for number in range(EACH)]
            clients, model = Federation.from_clients(rows), task["build_model"]()

            settings = {"clients": NODES * each, "rounds": ROUNDS, "folder": str(tmp_path / kind)}
            settings |= {"nodes": str(deployment.node_list), "evaluate": "2 classes", "held_out": HELD_OUT}
            settings |= {"round_timeout": PATIENCE, "node_timeout": PATIENCE}
            if each > 1:
                settings["clients_per_node"] = each
            app = make_app(tmp_path / f"app-{kind}", own_task=True, federation=settings)
            (app / "federation" / "task.py").write_text(text)
            done = run_app(app, deployment.environment, patience=4 * PATIENCE)
            assert done.returncode == 0, done.stdout + done.stderr
            deployed = Run.load(tmp_path / kind, model=task["build_model"]())

            evaluate = Evaluation("clients", held_out=HELD_OUT)
            simulated = fit(model, clients, epsilon=8, rounds=ROUNDS, evaluate=evaluate, secure=True)
            assert charged(deployed) == charged(simulated), "the same noise in the same votes, rounds and measurements"
            for name in ("epsilon_total", "delta", "rounds", "algorithm", "clients", "adjacency"):
                assert getattr(deployed.privacy, name) == getattr(simulated.privacy, name), name
            assert deployed.privacy.epsilon_total == pytest.approx(8.0, abs=1e-3)

            votes = Votes.of(model, clients)
            assert len(charged(deployed)) == 2 + 2 * ROUNDS + len(votes.engine.probe.scale_rounds)
            mean, deviation = votes.drawn(RATE, PRIOR_RATE)
            stands_out = abs(mean - math.log10(PRIOR_RATE)) > 2 * DEVIATIONS * deviation
            assert stands_out == (kind == "many"), "the rate of 200 clients is theirs and not the prior's"
            for run in (deployed, simulated):
                votes.explain(run.history)
                if kind == "many":
                    check_measurements(run, run.model, clients)
                else:
                    assert not any(key.startswith("clients_") for line in run.history for key in line)
            assert outcome(verify_run(tmp_path / kind)) == "holds"
