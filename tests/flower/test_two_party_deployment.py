"""Two aggregators as real processes with TLS: kills of everybody in a round, and what the ledgers then hold."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfedexp.accounting import Ledger
from dpfedexp.flower.local_deployment import Deployment, marked
from tests.sizes import long

from ..mechanisms.parties import helper_file, public_key
from .app_folder import LOCAL, PATIENCE, QUICK, make_app
from .test_deployment import checkpoint, finish, start

CLIENTS = 3
GUARD = """
max_epsilon_per_round = 1e3
max_epsilon_total = 1e4
delta = 1e-5
mechanisms = ["two-party"]
max_clip = 1.0
helper_key = "{key}"
"""
CLIENT = """
import os, signal
from pathlib import Path
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

def once(name):
    # The first process that comes here dies; the later ones live.
    try:
        os.close(os.open(Path(PLACE) / f"killed-{name}", os.O_CREAT | os.O_EXCL))
    except OSError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

draw = TwoPartyGaussian.noise_units

def dies(self, *arguments):
    once("helper")
    return draw(self, *arguments)

TwoPartyGaussian.noise_units = dies
"""
SERVER = """

from dpfedexp.engine import engine as rounds
from federation.client_app import once
move = rounds.advance


def dies(algorithm, release, state, **more):
    if state.round == 1:
        once("server")
    return move(algorithm, release, state, **more)


rounds.advance = dies
"""


class WithHelper(Deployment):
    """Nodes with a guard that pins the helper's key; the last node is the helper."""

    helper = guard = ""

    def start_supernode(self, index, key=None):
        last = index == self.nodes - 1
        self.node_config = {"dpfedexp-helper": self.helper} if last else {"dpfedexp-guard": self.guard}
        return super().start_supernode(index, key)


def app_of(place: Path) -> Path:
    federation = {
        "clients": CLIENTS,
        "min_reply_fraction": 0.6,
        "rounds": 2,
        "round_timeout": 60.0,
        "node_timeout": PATIENCE,
    }
    app = make_app(
        place / "app",
        federation={**federation, "budget": None, "folder": str(place / "out")},
        algorithm={"target_epsilon": None, "noise_multiplier": 2.0, "step": "paper", "aggregation": "two-party"},
        local=LOCAL,
    )
    client, server = (app / "federation" / f"{name}_app.py" for name in ("client", "server"))
    line = "    return answer(message, context, task.build_model(), task.data_of(context), loss=task.LOSS)\n"
    text = client.read_text()
    assert line in text
    dies = '    if context.node_config["partition-id"] == 1:\n        once("client")\n'
    client.write_text(text.replace(line, dies + line) + f"\n\nPLACE = {str(place)!r}\n" + CLIENT)
    server.write_text(server.read_text() + SERVER)
    return app


def rounds_of(path: Path) -> list[int]:
    with Ledger.open(path, read_only=True) as ledger:
        return [entry.round for entry in ledger.entries]


@long
@pytest.mark.usefixtures("alone")
def test_a_killed_party_has_released_nothing_uncharged_and_the_run_is_resumed(tmp_path):
    """By kill -9: in round 1 a client before it answers and the helper between charge and answer, in round 2 the server app
    between the helper's answer and the release. The run is resumed each time, and whatever was answered is on every ledger."""
    (tmp_path / "helper").mkdir()
    file = helper_file(tmp_path / "helper", min_clients=2, per_round=1e3, total=1e4)
    (tmp_path / "guard.toml").write_text(GUARD.format(key=public_key(file)), encoding="utf-8")
    WithHelper.helper, WithHelper.guard = str(file.path), str(tmp_path / "guard.toml")
    out, charged, app = tmp_path / "out", tmp_path / "helper" / "helper.ledger.jsonl", app_of(tmp_path)
    with WithHelper(
        tmp_path / "up", CLIENTS + 1, environment={**QUICK, "DPFEDEXP_PRIVATE": str(tmp_path / "state")}
    ) as deployment:
        log = finish(start(deployment, app), app)
        assert (tmp_path / "killed-client").exists(), log
        assert (tmp_path / "killed-helper").exists(), log
        assert checkpoint(out)["round"] == 0, "nothing was released"
        assert rounds_of(out / "ledger.jsonl") == rounds_of(charged) == [1]
        log = finish(start(deployment, app), app)
        assert (tmp_path / "killed-server").exists(), log
        assert checkpoint(out)["round"] == 1, log
        assert rounds_of(out / "ledger.jsonl") == rounds_of(charged) == [1, 1, 2]
        log = finish(start(deployment, app), app)
        assert checkpoint(out)["round"] == 2, log
        assert rounds_of(out / "ledger.jsonl") == rounds_of(charged) == [1, 1, 2, 2]
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["setting"] == "two-party"
    assert statement["rounds"] == 4, "what was charged and not released is in the statement too"
    assert marked(deployment.mark) == []
