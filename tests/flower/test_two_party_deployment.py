"""Two aggregators as real processes with TLS, and what the ledgers then hold."""

import json

import pytest

from dpfedexp.flower.local_deployment import Deployment
from tests.engine.small import entries
from tests.sizes import long

from ..mechanisms.parties import charges, helper_file, public_key
from .app_folder import LOCAL, PATIENCE, QUICK, make_app, run_app

CLIENTS = 3
GUARD = """
max_epsilon_per_round = 1e3
max_epsilon_total = 1e4
delta = 1e-5
mechanisms = ["two-party"]
max_clip = 1.0
helper_key = "{key}"
"""


@long
@pytest.mark.usefixtures("alone")
def test_two_rounds_with_a_helper_are_on_every_ledger(tmp_path):
    """What happens when a server, a client or the helper dies is tried in one process (`test_two_party.py`)."""
    (tmp_path / "helper").mkdir()
    file = helper_file(tmp_path / "helper", min_clients=2, per_round=1e3, total=1e4)
    (tmp_path / "guard.toml").write_text(GUARD.format(key=public_key(file)), encoding="utf-8")
    out, guard = tmp_path / "out", {"dpfedexp-guard": str(tmp_path / "guard.toml")}
    nodes = {**dict.fromkeys(range(CLIENTS), guard), CLIENTS: {"dpfedexp-helper": str(file.path)}}
    settings = {"clients": CLIENTS, "rounds": 2, "folder": str(out), "node_timeout": PATIENCE, "round_timeout": 60.0}
    app = make_app(
        tmp_path / "app",
        federation=settings,
        algorithm={"target_epsilon": None, "noise_multiplier": 2.0, "step": "paper", "aggregation": "two-party"},
        local=LOCAL,
    )
    own = {**QUICK, "DPFEDEXP_PRIVATE": str(tmp_path / "state")}
    with Deployment(tmp_path / "up", CLIENTS + 1, node_config=nodes, environment=own) as deployment:
        done = run_app(app, deployment.environment)
        assert done.returncode == 0, done.stdout + done.stderr
    assert [entry.round for entry in entries(out)] == [1, 2]
    assert charges(file) == 2
    statement = json.loads((out / "privacy.json").read_text())
    assert (statement["setting"], statement["rounds"]) == ("two-party", 2)
