"""A run that is killed many times ends like one that never was, and no round of it was released without its charge."""

import json
import multiprocessing
import os
import random
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from dpfedexp.accounting import Ledger
from dpfedexp.engine import checkpoint
from tests.engine.victim import ROUNDS, live
from tests.sizes import sized

KILLS = sized(8, 100)


def check_that_everything_released_was_charged(folder: Path) -> int:
    """From the files alone: how many rounds are complete."""
    if not (folder / "ledger.jsonl").exists():
        assert not checkpoint.exists(folder)
        assert not (folder / "metrics.jsonl").exists()
        return 0
    charged = [entry.round for entry in Ledger.open(folder / "ledger.jsonl", read_only=True).entries]
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
        [
            (entry.round, entry.event, entry.noise)
            for entry in Ledger.open(folder / "ledger.jsonl", read_only=True).entries
        ],
        (folder / "privacy.json").read_bytes(),
    )


@pytest.fixture
def processes():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.engine.victim"])
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
