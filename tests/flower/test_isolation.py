"""An enforcing site on real processes, with the app as another user: what a hostile app finds, and what arrives of it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from dpfedexp.accounting import Ledger
from dpfedexp.flower.app import app_hash
from dpfedexp.flower.local import Deployment
from dpfedexp.flower.site import NO_REPORT
from tests.sizes import long

from .apart import Apart
from .app_folder import LOCAL, PATIENCE, make_app
from .other_user import NOBODY, can_be_nobody

GUARD = """
max_epsilon_per_round = 50.0
max_epsilon_total = 100.0
delta = 1e-5
mechanisms = ["local-gaussian"]
max_clip = 1.0
apps = ["{}"]
"""
SPY = '''
import json, os
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict


def spy(message, context):
    """Node 0: looks for the site's secrets, changes what it can, and returns rows in every way that Flower has."""
    site, found = Path(context.run_config["test.site"]), {}
    for path in sorted(site.rglob("*")):
        for what, flags in (("read", os.O_RDONLY), ("written", os.O_WRONLY)):
            try:
                os.close(os.open(path, flags))
                found.setdefault(what, []).append(path.name)
            except OSError:
                pass
    found["user"] = os.getuid()
    Path(context.run_config["test.found"]).write_text(json.dumps(found))
    rows = message.content.array_records["arrays"]
    fields = {"round": 1, "nonce": message.content.config_records["dpfedexp"]["nonce"], "note": "row 47110815"}
    return Message(
        RecordDict({"dpfedexp.report": rows, "dpfedexp": ConfigRecord(fields), "m": MetricRecord({"rows": [4711.0815]})}),
        reply_to=message,
    )
'''


@long
@pytest.mark.skipif(not can_be_nobody(), reason="only root can start a process as another user")
@pytest.mark.usefixtures("alone")
def test_an_app_of_another_user_reads_no_secret_and_gets_nothing_out():
    """Node 0 is hostile, node 1 honest. One round, local privacy; then the same app with one byte more, which no site listed."""
    place = Path(tempfile.mkdtemp(prefix="dpfedexp-test-"))
    place.chmod(0o755)
    try:
        hostile_and_honest(place)
    finally:
        shutil.rmtree(place)


def hostile_and_honest(place: Path) -> None:
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    out = place / "out"
    app = make_app(
        place / "app",
        federation={"clients": 2, "rounds": 1, "floor": 0.5, "folder": str(out), "round_timeout": PATIENCE},
        algorithm={"name": "ldp_fedexp", "target_epsilon": None, "noise_multiplier": 3.0},
        local=LOCAL,
        test={"site": str(place / "up"), "found": str(shared / "found.json")},
    )
    client = app / "federation" / "client_app.py"
    text = client.read_text().replace("@app.train(mods=[private_training])\ndef train(", "def honest(")
    client.write_text(
        text.replace("from federation import task", "from federation import task\nfrom federation.spy import spy")
        + "\n\n@app.train()\ndef train(message: Message, context: Context) -> Message:\n"
        + '    if context.node_config["partition-id"] == 0:\n        return spy(message, context)\n'
        + "    return private_training(message, context, honest)\n"
    )
    (app / "federation" / "spy.py").write_text(SPY)
    site = place / "up"
    site.mkdir(mode=0o700)
    (site / "guard.toml").write_text(GUARD.format(app_hash(app)))
    quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "DPFEDEXP_DATA": ""}
    config = {"dpfedexp-guard": str(site / "guard.toml")}
    with Apart(site, 2, tls=True, node_config=config, environment=quick, enforce=True) as deployment:
        shown = run(deployment, app)
        (app / "federation" / "other.py").write_text("another = True\n")
        refused = run(deployment, app, "-c", f'federation.folder="{place / "second"}"')
    found = json.loads((shared / "found.json").read_text())
    assert found == {"user": NOBODY}, "the app saw files of the site"
    assert "'asked': 2, 'valid': 1, 'refused': 1" in shown, shown
    assert NO_REPORT in shown
    for path in [*site.glob("superlink.log"), *out.rglob("*")]:
        assert b"4711" not in path.read_bytes()
    charges = [len(Ledger.open(site / f"guard.node{i}.ledger.jsonl", read_only=True)) for i in (0, 1)]
    assert charges == [0, 1]
    assert refused.count("this app is not on the site's list") == 2, refused


def run(deployment: Deployment, app: Path, *options: str) -> str:
    return subprocess.run(
        [sys.executable, "-m", "dpfedexp", "flower", "run", ".", "up", *options],
        cwd=app,
        env=deployment.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    ).stdout
