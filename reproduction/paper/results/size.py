"""How much of the paper is run: all of it, or a quick version with the same shape of results."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from dpfedexp.accounting import calibrate_noise
from dpfedexp.accounting.events import central_gaussian
from dpfedexp.config import Settings
from reproduction.paper.experiments import vary

QUICK_CLIENTS, QUICK_IMAGES, QUICK_ROUNDS = 100, 20, 12
QUICK_PRIVUNIT = {"algorithm.epsilon0": 8.0, "algorithm.epsilon1": 8.0, "algorithm.gamma": "exact"}

QUICK_NOTE = (
    f"Quick: {QUICK_CLIENTS} clients with {QUICK_IMAGES} images each and {QUICK_ROUNDS} rounds on MNIST, few seeds. The noise on "
    "the mean update is about that of the full run (noise multiplier × M/1000 in CDP, × sqrt(M/1000) in LDP, larger ε in "
    "PrivUnit), so the shape of the results is kept and ε is not: these ε are far larger than the paper's. Accuracies after so "
    "few rounds are below those of the full run; what to look at is the order."
)


@dataclass(frozen=True)
class Size:
    """`seeds` runs of everything; `quick` shrinks the MNIST runs; `problem` leaves out the runs of the other one."""

    seeds: int = 5
    quick: bool = False
    problem: str | None = None

    @property
    def notes(self) -> list[str]:
        return [QUICK_NOTE] if self.quick else []

    def command(self, section: str) -> str:
        only = f" --problem {self.problem}" if self.problem else ""
        return f"python -m reproduction paper {section} --seeds {self.seeds}{only}" + (" --quick" if self.quick else "")

    def includes(self, problem: str) -> bool:
        return self.problem in (None, problem)

    def runs(self, settings: Settings, seeds: int | None = None) -> list[Settings]:
        """The settings at this size, once for every seed."""
        sized = shrink(settings) if self.quick and settings.data.kind == "mnist" else settings
        return [sized.with_seed(seed) for seed in range(min(self.seeds, seeds or self.seeds))]


def shrink(settings: Settings) -> Settings:
    """A small run whose mean update is as noisy as that of the full one."""
    share = QUICK_CLIENTS / settings.data.clients
    changes: dict[str, Any] = {
        "data.clients": QUICK_CLIENTS,
        "data.samples_per_client": QUICK_IMAGES,
        "run.rounds": QUICK_ROUNDS,
        "run.evaluate_every": 3,
    }
    algorithm = settings.algorithm
    z = _noise_multiplier(settings)
    if algorithm.mechanism == "privunit":
        changes |= QUICK_PRIVUNIT
    elif z is not None:
        changes["algorithm.noise_multiplier"] = z * (
            math.sqrt(share) if algorithm.mechanism == "local-gaussian" else share
        )
        changes["algorithm.target_epsilon"] = None
    return vary(settings, changes)


def _noise_multiplier(settings: Settings) -> float | None:
    """The noise of the full run, calibrated where the settings ask for an ε."""
    algorithm = settings.algorithm
    if algorithm.target_epsilon is None:
        return algorithm.noise_multiplier
    given = settings.build_algorithm()
    rounds = settings.run.rounds if given.target_per == "total" else 1
    return calibrate_noise(
        lambda z: central_gaussian(z, given.adjacency),
        target_epsilon=algorithm.target_epsilon,
        delta=given.delta,
        rounds=rounds,
    )
