"""A federation of real processes with TLS whose server and nodes are killed at random moments: what is released is charged.

The moment is found in the run's own files: the ledger says which vote, round or evaluation is under way. DPFEDEXP_KILLS sets how
many kills there are (50 take hours on two cores), DPFEDEXP_KILLS_SEED when and whom they hit.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from dpfedexp.accounting import Ledger, compose
from dpfedexp.engine import checkpoint
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import LedgerError
from dpfedexp.flower.app import new_app
from dpfedexp.flower.local_deployment import Deployment
from dpfedexp.flower.monitor import read_status
from tests.sizes import long

from .app_folder import (
    PATIENCE,
    QUICK,
    finish,
    kill_server_app,
    make_app,
    server_apps,
    start_app,
    wait_until,
)

KILLS = int(os.environ.get("DPFEDEXP_KILLS", "6"))
SEED = int(os.environ.get("DPFEDEXP_KILLS_SEED", "0"))
NODES, ROUNDS, LIVES = 3, 3, 5
VICTIMS = ("server app", "SuperLink", "node", "server app and node")
PLANNED = re.compile(r"Planned: epsilon ([\d.]+)")


class Federation(Deployment):
    """Nodes that are started again when they end, as an init system does it; the SuperLink refuses one that it takes for alive."""

    def __enter__(self) -> Federation:
        super().__enter__()
        self.over = threading.Event()
        self.keeper = threading.Thread(target=self._keep, daemon=True)
        self.keeper.start()
        return self

    def __exit__(self, *given: object) -> None:
        self.over.set()
        self.keeper.join()
        super().__exit__(*given)

    def _keep(self) -> None:
        while not self.over.wait(5.0):
            for number, process in enumerate(self.supernodes[:NODES]):
                if process.poll() is not None:
                    self.supernodes[number] = self.start_supernode(number)
                    self.supernodes.pop()

    def kill(self, victim: str, chance: random.Random) -> None:
        if "server app" in victim or victim == "SuperLink":
            kill_server_app(self)
        if victim == "SuperLink":
            self.superlink.kill()
            self.superlink.wait()
            self.start_superlink()
        if "node" in victim:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.supernodes[chance.randrange(NODES)].pid, signal.SIGKILL)


def charges(folder: Path) -> list:
    """What is on the ledger, which may be in the middle of being written."""
    try:
        with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
            return list(ledger.entries)
    except (LedgerError, OSError):
        return []


def check(folder: Path, kills: list[str]) -> None:
    """From the files alone: whatever was released has a charge, and the verification says what is true."""
    if not (folder / "ledger.jsonl").exists():
        assert not (folder / checkpoint.CHECKPOINT).exists(), kills
        return
    charged, progress = charges(folder), checkpoint.read_progress(folder)
    rounds = [entry.round for entry in charged if not entry.event.question]
    done = progress.round if progress else 0
    assert set(range(1, done + 1)) <= set(rounds) <= set(range(1, done + 2)), (kills, done, rounds)
    lines = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    assert {json.loads(line)["round"] for line in lines} <= set(rounds), kills
    if done:  # the rounds could not begin before both votes were answered
        assert {"local rate", "first clip"} <= {entry.event.question for entry in charged}, kills
    completed = (folder / "status.json").exists() and read_status(folder)["status"] == "completed"
    found = verify_run(folder)
    assert outcome(found) in (("holds",) if completed else ("holds", "incomplete")), (kills, found)


def is_running(folder: Path, deployment: Federation) -> bool:
    return (folder / "status.json").exists() and bool(server_apps(deployment))


def wait_for(folder: Path, moment: int, deployment: Federation, process: subprocess.Popen) -> None:
    """Until the server app runs and the ledger has so many charges, or the run has ended."""

    def reached() -> bool:
        return process.poll() is not None or (is_running(folder, deployment) and len(charges(folder)) >= moment)

    wait_until(reached, f"charge {moment}")


@long
@pytest.mark.usefixtures("alone")
def test_whatever_is_killed_and_whenever_nothing_is_released_uncharged_and_every_resume_ends(tmp_path):
    """The nodes train on the files of the template's app."""
    chance, made, runs = random.Random(SEED), Counter(), 0
    settings = {"rounds": ROUNDS, "clients": NODES, "round_timeout": 120.0, "node_timeout": PATIENCE}
    settings |= {"evaluate": "numbers", "evaluate_every": 1}
    new_app(tmp_path / "nodes")
    data = {node: {"data": str(tmp_path / "nodes" / "data" / f"node{node}.csv")} for node in range(NODES)}
    own = {**QUICK, "DPFEDEXP_PRIVATE": str(tmp_path / "state")}
    with Federation(tmp_path / "up", NODES, node_config=data, environment=own) as deployment:
        while sum(made.values()) < KILLS:
            folder = tmp_path / f"run{runs}"
            given = {**settings, "folder": str(folder), "nodes": str(deployment.node_list)}
            app = make_app(tmp_path / f"app{runs}", own_task=True, federation=given)
            runs, kills = runs + 1, []
            while len(kills) < LIVES and sum(made.values()) < KILLS:
                process = start_app(app, deployment.environment)
                # During what is asked next, or after its charge. The first two charges are the votes'.
                wait_for(folder, len(charges(folder)) + chance.randrange(2), deployment, process)
                time.sleep(chance.uniform(0.0, 6.0))
                victim, before, alive = chance.choice(VICTIMS), charges(folder), is_running(folder, deployment)
                deployment.kill(victim, chance)
                if victim == "node":  # the run itself goes on without it, and is stopped as a user would
                    time.sleep(chance.uniform(0.0, 10.0))
                    deployment.kill("server app", chance)
                finish(process, app)
                check(folder, kills)
                if not alive or process.returncode == 0:
                    break
                charge = (before[-1].event.question or f"round {before[-1].round}") if before else "nothing"
                kills.append(f"{victim}, after {charge}")
                made[kills[-1]] += 1
                print(f"{time.strftime('%X')} kill {sum(made.values())}: {kills[-1]}", flush=True)
            while not (folder / "status.json").exists() or read_status(folder)["status"] != "completed":
                text = finish(start_app(app, deployment.environment), app)
                check(folder, kills)
                # A node that was killed may be missing for so long that a round fails; then it is tried again.
                assert (folder / "status.json").exists(), text
                assert read_status(folder)["status"] in ("completed", "failed", "killed"), (kills, text)
            statement = json.loads((folder / "privacy.json").read_text())
            total = compose([(entry.event, 1) for entry in charges(folder)], statement["delta"]).epsilon
            assert statement["epsilon_total"] == pytest.approx(total, rel=1e-9), kills
            announced = [float(found) for found in PLANNED.findall((app / "run.log").read_text())]
            assert announced[0] == pytest.approx(8.0, abs=1e-3)
            assert announced == sorted(announced), "what was charged in vain is never forgotten"
            assert announced[-1] >= statement["epsilon_total"] - 1e-4, (kills, announced, statement["epsilon_total"])
    print(json.dumps(made, indent=2))
