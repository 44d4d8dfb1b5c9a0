"""Two aggregators as real processes with TLS, a killed server, and what the ledgers then hold."""

import json
import os
import signal
from pathlib import Path

import pytest

from dpfedexp.accounting import Ledger
from dpfedexp.flower.local_deployment import Deployment, processes_of
from tests.sizes import long

from ..mechanisms.parties import helper_file, public_key
from .app_folder import LOCAL, PATIENCE, QUICK, make_app, wait_until
from .test_deployment import _programs, checkpoint, finish, start

CLIENTS = 3
GUARD = """
max_epsilon_per_round = 1e3
max_epsilon_total = 1e4
delta = 1e-5
mechanisms = ["two-party"]
max_clip = 1.0
helper_key = "{key}"
"""


class WithHelper(Deployment):
    """Nodes with a guard that pins the helper's key; the last node is the helper."""

    helper = guard = ""

    def start_supernode(self, index, key=None):
        last = index == self.nodes - 1
        self.node_config = {"dpfedexp-helper": self.helper} if last else {"dpfedexp-guard": self.guard}
        return super().start_supernode(index, key)


def rounds_of(path: Path) -> list[int]:
    with Ledger.open(path, read_only=True) as ledger:
        return [entry.round for entry in ledger.entries]


@long
@pytest.mark.usefixtures("alone")
def test_two_rounds_with_a_helper_are_on_every_ledger_and_a_server_that_is_killed_goes_on(tmp_path):
    """The server app is killed by kill -9 after round 1. What happens when it, a client or the helper dies within a round is tried
    in one process (`test_two_party.py`)."""
    (tmp_path / "helper").mkdir()
    file = helper_file(tmp_path / "helper", min_clients=2, per_round=1e3, total=1e4)
    (tmp_path / "guard.toml").write_text(GUARD.format(key=public_key(file)), encoding="utf-8")
    WithHelper.helper, WithHelper.guard = str(file.path), str(tmp_path / "guard.toml")
    out, charged = tmp_path / "out", tmp_path / "helper" / "helper.ledger.jsonl"
    settings = {"clients": CLIENTS, "rounds": 2, "folder": str(out), "node_timeout": PATIENCE, "round_timeout": 60.0}
    app = make_app(
        tmp_path / "app",
        federation=settings,
        algorithm={"target_epsilon": None, "noise_multiplier": 2.0, "step": "paper", "aggregation": "two-party"},
        local=LOCAL,
    )
    own = {**QUICK, "DPFEDEXP_PRIVATE": str(tmp_path / "state")}
    with WithHelper(tmp_path / "up", CLIENTS + 1, environment=own) as deployment:
        first = start(deployment, app)
        wait_until(lambda: checkpoint(out)["round"] == 1, "round 1", first)
        for pid in _programs(deployment, "flwr-serverapp"):
            os.kill(pid, signal.SIGKILL)
        finish(first, app)
        log = finish(start(deployment, app), app)
        assert checkpoint(out)["round"] == 2, log
    # The server that was killed may have charged round 2 already, and may have asked the helper then.
    rounds, helped = rounds_of(out / "ledger.jsonl"), rounds_of(charged)
    assert rounds in ([1, 2], [1, 2, 2])
    assert [1, 2] <= helped <= rounds
    statement = json.loads((out / "privacy.json").read_text())
    assert (statement["setting"], statement["rounds"]) == ("two-party", len(rounds))
    assert processes_of(deployment.mark) == []
