"""The step-size rules: from what a mechanism released to η_g. Each is an equation of `step_size.py`, and post-processing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from dpfedexp import step_size
from dpfedexp.errors import require
from dpfedexp.mechanisms import Release

Rule = Callable[[Release], float]


def one(release: Release) -> float:
    """η_g = 1: FedAvg."""
    return 1.0


@dataclass(frozen=True)
class FixedRate:
    """η_g = rate: FedAvg with a server learning rate."""

    rate: float

    def __post_init__(self) -> None:
        require(0 < self.rate < math.inf, f"server rate is {self.rate}; it must be a positive number.")

    def __call__(self, release: Release) -> float:
        return self.rate


def fedexp(release: Release) -> float:
    """FedEXP without privacy (eq:step-size-fedexp)."""
    return step_size.fedexp(release.numerator, release.c_bar)


def free(release: Release) -> float:
    """The free rule: ‖Δ‖² comes back from one more coordinate inside the same ball."""
    return step_size.free(release.numerator, release.c_bar, release.clip)


def cdp(release: Release) -> float:
    """CDP-FedEXP with the paper's own query (eq:step-size-cdp)."""
    return step_size.cdp(release.numerator, release.c_bar)


def ldp_gaussian(release: Release) -> float:
    """LDP-FedEXP with Gaussian noise, whose known part is subtracted (eq:step-size-gaussian)."""
    return step_size.ldp_gaussian(release.numerator, release.c_bar, release.sigma)


def ldp_privunit(release: Release) -> float:
    """LDP-FedEXP with PrivUnit's own estimates of the squared norms (eq:step-size-privunit)."""
    return step_size.ldp_privunit(release.numerator, release.c_bar)


def naive(release: Release) -> float:
    """The biased rule that the paper warns of (eq:naive)."""
    return step_size.naive(release.numerator, release.c_bar)
