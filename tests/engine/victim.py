"""A process that trains until it is killed, for `test_kill`; imported once by the fork server, so that a life starts at once."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from dpfedexp.cli.train import execute
from dpfedexp.config import parse
from dpfedexp.engine.rounds import Simulation
from dpfedexp.engine.run import RunFolder

ROUNDS = 50
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
