"""Two aggregators as real processes with TLS, on MNIST: the sums of plain aggregation, and kills of everybody in a round."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpfedexp.accounting import Ledger
from dpfedexp.flower.local import Deployment, marked
from tests.sizes import long

from ..mechanisms.parties import helper_file, public_key
from .app_folder import PATIENCE, make_app
from .test_deployment import checkpoint, counts, start

CLIENTS = 3
FEDERATION = {"clients": CLIENTS, "floor": 0.6, "round_timeout": PATIENCE, "node_timeout": PATIENCE, "budget": None}
ALGORITHM = {"name": "cdp_fedexp", "target_epsilon": None, "noise_multiplier": 2.0, "clip": 0.5, "step": "paper"}
GUARD = """
max_epsilon_per_round = 1e3
max_epsilon_total = 1e4
delta = 1e-5
mechanisms = ["central-gaussian", "two-party"]
max_clip = 1.0
helper_key = "{key}"
"""
CLIENT = """
import os, signal
from pathlib import Path
import torch
from dpfedexp.flower import helper as helper_file
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

class Silence:
    def normal(self, clients, width, device, dtype):
        return torch.zeros(len(clients), width, device=device, dtype=dtype)

def once(name):
    # The first process that comes here dies; whoever comes after it lives.
    try:
        os.close(os.open(PLACE / f"killed-{name}", os.O_CREAT | os.O_EXCL))
    except OSError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
"""
SILENT = """
make = helper_file.HelperFile.helper
helper_file.HelperFile.helper = lambda self: make(self, Silence)
"""
KILLS = """
draw = TwoPartyGaussian.noise_units

def dies(self, *arguments):
    once("helper")
    return draw(self, *arguments)

TwoPartyGaussian.noise_units = dies
"""
TRAIN = """
    if context.node_config["partition-id"] == 1:
        once("client")
"""


class WithHelper(Deployment):
    """Nodes with a guard that pins the helper's key; the last node is the helper, which is started by `start_helper`."""

    helper = guard = ""

    def start_supernode(self, index, key=None):
        if index == self.nodes - 1:
            return None
        self.node_config = {"dpfedexp-guard": self.guard}
        return super().start_supernode(index, key)

    def start_helper(self):
        self.node_config = {"dpfedexp-helper": self.helper}
        super().start_supernode(self.nodes - 1)


def app_of(place: Path, name: str, aggregation: str, *, silent=False, kills=False, rounds=2) -> Path:
    app = make_app(
        place / name,
        federation={**FEDERATION, "rounds": rounds, "folder": str(place / f"{name}-out")},
        algorithm={**ALGORITHM, "aggregation": aggregation},
        local={"lr": 0.05, "steps": 3},
    )
    task = app / "federation" / "task.py"
    few = task.read_text().replace(
        'return everyone(node["num-partitions"]).client(node["partition-id"])',
        'return tuple(part[:30] for part in everyone(node["num-partitions"]).client(node["partition-id"]))',
    )
    assert "[:30]" in few
    task.write_text(few)
    client = app / "federation" / "client_app.py"
    head = f"from pathlib import Path\nPLACE = Path({str(place)!r})\n" + CLIENT
    text = client.read_text() + head + (SILENT if silent else "") + (KILLS if kills else "")
    if kills:
        line = "    inputs, targets = task.data_of(context.node_config)\n"
        assert line in text
        text = text.replace(line, TRAIN.lstrip("\n") + line)
    client.write_text(text)
    server = app / "federation" / "server_app.py"
    text = server.read_text()
    if silent:
        text = text.replace(
            "strategy_from(context.run_config)", "strategy_from(context.run_config, noise=client_app.Silence)"
        )
        text = text.replace("from federation import task", "from federation import client_app, task")
    if kills:
        text += (
            "\n\nfrom dpfedexp.flower import strategy as rounds\nfrom federation.client_app import once\n"
            "move = rounds.advance\n\n\ndef dies(algorithm, release, state, **more):\n    if state.round == 1:\n"
            '        once("server")\n    return move(algorithm, release, state, **more)\n\n\nrounds.advance = dies\n'
        )
    server.write_text(text)
    return app


def finish(process: subprocess.Popen, app: Path) -> str:
    """The streamed log of a run that has ended; every message of it starts a process that reads MNIST."""
    try:
        process.wait(600.0)
    finally:
        process.kill()
        process.wait()
    return (app / "run.log").read_text()


def rounds_of(path: Path) -> list[int]:
    with Ledger.open(path, read_only=True) as ledger:
        return [entry.round for entry in ledger.entries]


pytestmark = [long, pytest.mark.skipif(not os.environ.get("DPFEDEXP_DATA"), reason="needs MNIST in DPFEDEXP_DATA")]


@pytest.fixture
def deployment(tmp_path):
    (tmp_path / "helper").mkdir()
    file = helper_file(tmp_path / "helper", min_clients=2, per_round=1e3, total=1e4)
    guard = tmp_path / "guard.toml"
    guard.write_text(GUARD.format(key=public_key(file)), encoding="utf-8")
    quick = {
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "OMP_NUM_THREADS": "1",
        "DPFEDEXP_PRIVATE": str(tmp_path / "state"),
    }
    WithHelper.helper, WithHelper.guard = str(file.path), str(guard)
    with WithHelper(tmp_path / "up", CLIENTS + 1, tls=True, environment=quick) as running:
        yield running
    assert marked(running.mark) == []


@pytest.mark.usefixtures("alone")
def test_sums_are_those_of_plain_aggregation(deployment, tmp_path):
    """Two rounds each, without noise: every parameter and every number of the history is the same, bit for bit."""
    finals, place = [], tmp_path
    for name in ("plain", "two-party"):
        if name == "two-party":
            deployment.start_helper()
        app = app_of(place, name, name, silent=True)
        log = finish(start(deployment, app), app)
        content = checkpoint(place / f"{name}-out")
        assert content["round"] == 2, log
        assert [counts(line) for line in content["history"]] == [(3, 3, 0, 0)] * 2, log
        finals.append((load_file(place / f"{name}-out" / "round-2.safetensors")["w"], content["history"]))
    (plain, history), (two, other) = finals
    assert float(plain.norm()) > 1.0
    assert torch.equal(plain, two)
    assert history == other


@pytest.mark.usefixtures("alone")
def test_whoever_is_killed_has_released_nothing_uncharged_and_the_run_is_resumed(deployment, tmp_path):
    """By kill -9: in round 1 a client before it answers and the helper between charge and answer, in round 2 the server app
    between the helper's answer and the release. The run is resumed each time, and whatever was answered is on every ledger."""
    deployment.start_helper()
    place, books = tmp_path, tmp_path / "helper" / "helper.ledger.jsonl"
    app, out = app_of(place, "killed", "two-party", kills=True), place / "killed-out"
    short = "federation.round_timeout=60.0"
    log = finish(start(deployment, app, short), app)
    assert (place / "killed-client").exists(), log
    assert (place / "killed-helper").exists(), log
    assert not (out / "checkpoint.json").exists(), "nothing was released"
    assert rounds_of(out / "ledger.jsonl") == [1]
    assert rounds_of(books) == [1]
    log = finish(start(deployment, app, f"{short} federation.resume=true"), app)
    assert (place / "killed-server").exists(), log
    assert checkpoint(out)["round"] == 1, log
    assert rounds_of(out / "ledger.jsonl") == [1, 1, 2]
    assert rounds_of(books) == [1, 1, 2]
    log = finish(start(deployment, app, f"{short} federation.resume=true"), app)
    assert checkpoint(out)["round"] == 2, log
    assert rounds_of(out / "ledger.jsonl") == [1, 1, 2, 2]
    assert rounds_of(books) == [1, 1, 2, 2]
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["setting"] == "two-party"
    assert statement["rounds"] == 4, "what was charged and not released is in the statement too"
