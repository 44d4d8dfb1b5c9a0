"""A run that is killed many times ends like one that never was, and no round of it was released without its charge."""

import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpfedexp.cli.train import execute
from dpfedexp.config import parse
from dpfedexp.engine import checkpoint
from dpfedexp.engine.rounds import Simulation
from dpfedexp.engine.run import RunFolder
from tests.engine.small import entries
from tests.sizes import sized

KILLS = sized(8, 100)
ROUNDS = sized(20, 50)
SETTINGS = parse(
    {
        "data": {"kind": "synthetic", "clients": 12, "dimension": 6},
        "algorithm": {"name": "cdp_fedexp", "clip": "adaptive", "noise_multiplier": 2.0},
        "local": {"lr": 0.01, "steps": 2},
        "run": {"rounds": ROUNDS, "device": "cpu", "trainer": "loop"},
    }
)


def live(folder: Path, began: int | None = None) -> None:
    """Train in the folder from wherever it stands; a byte goes to `began` when a round begins, and the last waits to be killed."""
    torch.set_num_threads(1)
    step = Simulation.step

    def announced(self, state, *given):
        if began is not None:
            os.write(began, b".")
            if state.round == ROUNDS - 1:
                time.sleep(600)
        return step(self, state, *given)

    Simulation.step = announced
    execute(SETTINGS, RunFolder(folder, resume=True), resume=True, progress=False)


def check_that_everything_released_was_charged(folder: Path) -> int:
    """From the files alone: how many rounds are complete."""
    if not (folder / "ledger.jsonl").exists():
        assert not checkpoint.exists(folder)
        assert not (folder / "metrics.jsonl").exists()
        return 0
    charged = [entry.round for entry in entries(folder)]
    assert charged == list(range(1, len(charged) + 1))
    progress = checkpoint.read_progress(folder)
    done = progress.round if progress else 0
    assert len(charged) in (done, done + 1)
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True) if metrics.exists() else []
    shown = [json.loads(line)["round"] for line in lines if line.endswith("\n")]
    assert all(number in charged for number in shown)
    return done


def outcome(folder: Path):
    history = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in history:
        del record["seconds"]
    weights = load_file(folder / "model.safetensors")["weight"]
    return (
        weights.numpy().tobytes(),
        history,
        [(entry.round, entry.event, entry.noise) for entry in entries(folder)],
        (folder / "privacy.json").read_bytes(),
    )


@pytest.fixture
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def wait_for_first_round(began: int, process) -> None:
    os.set_blocking(began, False)
    while process.is_alive():
        try:
            if os.read(began, 1):
                return
        except BlockingIOError:
            time.sleep(0.0005)


def test_kills_at_random_moments_change_nothing(tmp_path, processes):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed = processes.Process(target=live, args=(whole,))
    undisturbed.start()
    undisturbed.join()
    assert undisturbed.exitcode == 0
    moments, window = random.Random(0), 0.01
    for kill in range(KILLS):
        done = check_that_everything_released_was_charged(broken)
        assert done < ROUNDS
        # The window follows the machine's pace, so that the kills spread over all the rounds.
        window = min(1.0, max(1e-4, window * (0.6 if done > kill * ROUNDS // KILLS else 1.2)))
        read, write = multiprocessing.Pipe(duplex=False)
        process = processes.Process(target=announce_and_live, args=(broken, write))
        process.start()
        if done < ROUNDS - 2 and moments.random() < 0.9:
            wait_for_first_round(read.fileno(), process)
            time.sleep(moments.uniform(0.0, window))
        process.kill()
        process.join()
        assert process.exitcode == -9
        read.close()
        write.close()
    last = processes.Process(target=live, args=(broken,))
    last.start()
    last.join()
    assert last.exitcode == 0
    assert check_that_everything_released_was_charged(broken) == ROUNDS
    assert outcome(broken) == outcome(whole)


def announce_and_live(folder: Path, began) -> None:
    live(folder, began.fileno())
