"""A process that trains until it is killed, for `test_kill`; imported once by the fork server, so that a life starts at once."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dpfedexp.cli.train import execute
from dpfedexp.config import parse
from dpfedexp.simulation.engine import Simulation
from dpfedexp.simulation.output import RunFolder

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
    """Train in the folder from wherever it stands; a byte goes to `began` when the first round of this life begins."""
    torch.set_num_threads(1)
    step = Simulation.step

    def announced(self, *given):
        if began is not None:
            os.write(began, b".")
        return step(self, *given)

    Simulation.step = announced
    execute(SETTINGS, RunFolder(folder, resume=True), resume=True, progress=False)
