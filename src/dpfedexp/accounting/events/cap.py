"""The cap of PrivUnit on the sphere in R^d: how likely a direction falls into it, and how much of the sphere it is.

The mechanism draws from these constants and the accountant charges them, so both read them here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dpfedexp.errors import InputError, require

GammaRule = Literal["exact", "paper", "optimal"]


@dataclass(frozen=True)
class Direction:
    """The constants of PrivUnit on the sphere in R^d: P(cap) = p, cap {⟨v,u⟩ ≥ γ} of mass q, and log m with ‖z‖ = 1/m."""

    dimension: int
    p: float
    gamma: float
    q: float
    log_m: float

    @property
    def m(self) -> float:
        return math.exp(self.log_m)

    @property
    def epsilon(self) -> float:
        """The exact ε of V: the log of the ratio of the density inside the cap to that outside."""
        return math.log(self.p / (1 - self.p)) + math.log((1 - self.q) / self.q)


def _direction(dimension: int, p: float, gamma: float, q: float) -> Direction:
    from scipy.special import betaln

    half = (dimension - 1) / 2
    log_m = (
        -betaln(0.5, half)
        + half * math.log1p(-gamma * gamma)
        - math.log(dimension - 1)
        + math.log((p - q) / (q * (1 - q)))
    )
    return Direction(dimension, p, gamma, q, float(log_m))


@lru_cache(maxsize=256)
def direction(dimension: int, epsilon0: float, epsilon1: float, rule: GammaRule = "exact") -> Direction:
    """PrivUnit's constants.

    The rules:
        exact: the largest γ that ε₁ allows: q = 1/(1 + e^{ε₁}).
        paper: γ = tanh(ε₁/2)·sqrt(π/(2(d−1))), the paper's first condition: only sufficient, and unsound at d = 2.
        optimal: ε₀ + ε₁ split so that 1/m, and with it the variance, is smallest (Asi, Feldman and Talwar 2022).
    """
    require(dimension >= 2, f"PrivUnit needs a model of at least 2 parameters; this one has {dimension}.")
    for name, value in (("epsilon0", epsilon0), ("epsilon1", epsilon1)):
        require(0 < value <= 500, f"{name} is {value}; it must be above 0 and at most 500.")
    if rule == "optimal":
        from scipy.optimize import minimize_scalar

        total = epsilon0 + epsilon1
        best = minimize_scalar(
            lambda e0: -direction(dimension, e0, total - e0).log_m,
            bounds=(1e-3 * total, 0.999 * total),
            method="bounded",
            options={"xatol": 1e-6 * total},
        )
        return direction(dimension, float(best.x), total - float(best.x))
    from scipy.special import betaincc, betainccinv

    p = 1 / (1 + math.exp(-epsilon0))
    half = (dimension - 1) / 2
    if rule == "exact":
        q = 1 / (1 + math.exp(epsilon1))
        return _direction(dimension, p, math.sqrt(betainccinv(0.5, half, 2 * q)), q)
    if rule != "paper":
        raise InputError(f"gamma is {rule!r}; it must be 'exact', 'paper' or 'optimal'.")
    gamma = math.tanh(epsilon1 / 2) * math.sqrt(math.pi / (2 * (dimension - 1)))
    require(
        gamma < 1,
        f"the paper's rule gives gamma = {gamma:.3f} for epsilon1 = {epsilon1} and {dimension} parameters, an empty cap; "
        "use gamma='exact'.",
    )
    return _direction(dimension, p, gamma, 0.5 * float(betaincc(0.5, half, gamma * gamma)))


def level_count(epsilon2: float) -> int:
    """k = ⌈e^{ε₂/3}⌉: ScalarDP's levels are 0, …, k."""
    return math.ceil(math.exp(epsilon2 / 3) * (1 - 1e-12))
