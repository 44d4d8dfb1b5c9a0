"""`fit` on ten real nodes with TLS and with files of their own, against `fit` on one machine for the same clients.

The app says `epsilon = 8` and nothing else about training. What both choose without noise, and that what clients measure is true,
is tried in one process (`engine/test_cohorts.py`, `engine/test_evaluation.py`)."""

import math
from pathlib import Path

import numpy as np
import pytest

from dpfedexp import Evaluation, Federation, Run, fit
from dpfedexp.core.local_rate import PRIOR_RATE
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.flower.local_deployment import Deployment
from tests.sizes import long

from .app_folder import PATIENCE, QUICK, make_app, run_app

NODES, EACH, ROWS, ROUNDS, HELD_OUT = 10, 20, 20, 2, 0.25
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
        x = 0.2 * (
            draw.normal(size=(EACH, ROWS, 4)) + shift
        )  # small numbers: the right rate is far above the usual 0.1
        y = draw.random((EACH, ROWS)) < 1 / (1 + np.exp(-(x @ [10.0, -7.5, 5.0, 0.0] + 0.5)))
        names = np.repeat(np.arange(EACH)[:, None], ROWS, 1)
        rows = np.concatenate([names[..., None], x, y[..., None]], axis=2).reshape(-1, 6)
        paths.append(folder / f"site{node}.csv")
        np.savetxt(paths[-1], rows, delimiter=",", header="client,a,b,c,d,y", comments="", fmt="%.9g")
    return paths


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
    with Deployment(tmp_path / "up", NODES, of_node=data, environment=own) as deployment:
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

            for run in (deployed, simulated):
                measured = [any(key.startswith("clients_") for key in line) for line in run.history]
                assert measured == [kind == "many"] * ROUNDS, "one client to a node: too few for a measurement"
                moved = abs(math.log10(run.history[0]["local_rate"] / PRIOR_RATE))
                assert kind == "one" or moved > 1.0, "the rate of 200 clients is theirs and not the prior's"
            assert outcome(verify_run(tmp_path / kind)) == "holds"
