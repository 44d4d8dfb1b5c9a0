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
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpfedexp.accounting import Ledger, compose
from dpfedexp.engine import checkpoint
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import LedgerError
from dpfedexp.flower.local_deployment import Deployment
from dpfedexp.flower.monitor import read_status
from tests.sizes import long

from .app_folder import PATIENCE, QUICK, make_app
from .test_deployment import _programs, finish, start

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
            for pid in _programs(self, "flwr-serverapp"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
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


def purpose_of(entry) -> str:
    question = entry.event.question
    return question or f"round {entry.round}"


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
    completed = read_status(folder)["status"] == "completed" if (folder / "status.json").exists() else False
    found = verify_run(folder)
    assert outcome(found) in (("holds",) if completed else ("holds", "incomplete")), (kills, found)
    command = [sys.executable, "-m", "dpfedexp", "privacy", "verify", str(folder)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert said.returncode == (0 if outcome(found) == "holds" else 4), (kills, said.stdout, said.stderr)


def wait_for(folder: Path, moment: int, deployment: Federation, process: subprocess.Popen) -> bool:
    """Until the server app runs and the ledger has so many charges; False where the run ended before."""
    deadline = time.monotonic() + PATIENCE
    while not is_running(folder, deployment) or len(charges(folder)) < moment:
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, f"no charge {moment} within {PATIENCE:g} seconds"
        time.sleep(0.2)
    return True


def is_running(folder: Path, deployment: Federation) -> bool:
    return (folder / "status.json").exists() and bool(_programs(deployment, "flwr-serverapp"))


@contextlib.contextmanager
def federation(place: Path) -> Iterator[Federation]:
    app = make_app(place / "app", own_task=True)
    data = {number: {"data": str(app / "data" / f"node{number}.csv")} for number in range(NODES)}
    own = {**QUICK, "DPFEDEXP_PRIVATE": str(place / "state")}
    with Federation(place / "up", NODES, of_node=data, environment=own) as deployment:
        yield deployment


@long
@pytest.mark.usefixtures("alone")
def test_whatever_is_killed_and_whenever_nothing_is_released_uncharged_and_every_resume_ends(tmp_path):
    chance, made, runs = random.Random(SEED), Counter(), 0
    settings = {"rounds": ROUNDS, "clients": NODES, "round_timeout": 120.0, "node_timeout": PATIENCE}
    settings |= {"evaluate": "numbers", "evaluate_every": 1}
    with federation(tmp_path) as deployment:
        while sum(made.values()) < KILLS:
            folder, log = tmp_path / f"run{runs}", tmp_path / f"app{runs}"
            own = {**settings, "folder": str(folder), "nodes": str(deployment.node_list)}
            app = make_app(log, own_task=True, federation=own)
            runs, kills = runs + 1, []
            while len(kills) < LIVES and sum(made.values()) < KILLS:
                process = start(deployment, app)
                # During what is asked next, or after its charge. The first two charges are the votes'.
                here = wait_for(folder, len(charges(folder)) + chance.randrange(2), deployment, process)
                time.sleep(chance.uniform(0.0, 6.0))
                victim, before, alive = chance.choice(VICTIMS), charges(folder), is_running(folder, deployment)
                deployment.kill(victim, chance)
                if victim == "node":  # the run itself goes on without it, and is stopped as a user would
                    time.sleep(chance.uniform(0.0, 10.0))
                    deployment.kill("server app", chance)
                finish(process, app)
                check(folder, kills)
                if not here or not alive or process.returncode == 0:
                    break
                kills.append(f"{victim}, after {purpose_of(before[-1]) if before else 'nothing'}")
                made[kills[-1]] += 1
                print(f"{time.strftime('%X')} kill {sum(made.values())}: {kills[-1]}", flush=True)
            while not (folder / "status.json").exists() or read_status(folder)["status"] != "completed":
                text = finish(start(deployment, app), app)
                check(folder, kills)
                # A node that was killed may be missing for so long that a round fails; then it is tried again.
                assert (folder / "status.json").exists(), text
                assert read_status(folder)["status"] in ("completed", "failed", "killed"), (kills, text)
            check(folder, kills)
            statement = json.loads((folder / "privacy.json").read_text())
            total = compose([(entry.event, 1) for entry in charges(folder)], statement["delta"]).epsilon
            assert statement["epsilon_total"] == pytest.approx(total, rel=1e-9), kills
            announced = [float(found) for found in PLANNED.findall((app / "run.log").read_text())]
            assert announced[0] == pytest.approx(8.0, abs=1e-3)
            assert announced == sorted(announced), "what was charged in vain is never forgotten"
            assert announced[-1] >= statement["epsilon_total"] - 1e-4, (kills, announced, statement["epsilon_total"])
    print(json.dumps(made, indent=2))
