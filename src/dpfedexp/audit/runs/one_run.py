"""What so many right guesses of so many coins refute: two tests for one run with many canaries.

Every canary takes part or not, by a fair coin of its own; afterwards the attacker guesses some of the coins. The first test
(Steinke, Nasr and Jagielski 2023, Theorem 5.2) holds for every (ε, δ)-DP run. The second (Mahloujifar, Melis and Chaudhuri 2025,
their numerical procedure for c' guesses) takes the whole trade-off curve, here that of μ-GDP, and proves more.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr, ndtri
from scipy.stats import binom

_LARGEST_MU = 50.0


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """P(at least so many right) under (ε, δ)-DP: Theorem 5.2 of Steinke, Nasr and Jagielski."""
    q = 1.0 / (1.0 + math.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, q))
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, q))
    alpha = float(np.max(below / np.arange(1, right + 1))) if right else 0.0
    return min(1.0, beta + 2.0 * canaries * delta * alpha)


def epsilon_of_guesses(canaries: int, guesses: int, right: int, delta: float, failure: float) -> float:
    """The largest ε that so many right guesses refute."""
    if guesses == 0 or p_value(canaries, guesses, right, 0.0, delta) > failure:
        return 0.0
    # Never above the root: a bound must not be rounded up.
    root = brentq(lambda e: p_value(canaries, guesses, right, e, delta) - failure, 0.0, 60.0, xtol=1e-9)
    return max(0.0, float(root) - 1e-8)


def refutes_gdp(canaries: int, guesses: int, right: int, mu: float, failure: float) -> bool:
    """Whether μ-GDP gives so many right guesses, or more, a probability below `failure`.

    Suppose that probability is τ. Among outcomes with at least i right guesses let r_i be the mass of right guesses of a canary and
    h_i that of wrong ones, averaged over canaries. At i = c they are at least τc/m and τ(c' − c)/m. Flipping a canary's own coin
    turns right into wrong, so h_i ≥ f̄⁻¹(r_{i+1}) with the curve's blow-up f̄(x) = Φ(Φ⁻¹(x) + μ); and outcomes with exactly i right
    have i/(c' − i) right guesses for a wrong one. Followed down to i = 0 this must not exceed the whole mass c'/m.
    """
    if not 0 < right <= guesses:
        return False
    r, h = failure * right / canaries, failure * (guesses - right) / canaries
    for i in range(right - 1, -1, -1):
        wrong = max(h, float(ndtr(ndtri(r) - mu)))
        r, h = r + i / (guesses - i) * (wrong - h), wrong
        if r + h > guesses / canaries:
            return True
    return False


def mu_of_guesses(canaries: int, guesses: int, right: int, failure: float) -> float:
    """The largest μ that so many right guesses refute, never rounded up."""
    if not refutes_gdp(canaries, guesses, right, 0.0, failure):
        return 0.0
    low, high = 0.0, _LARGEST_MU
    while high - low > 1e-6:
        middle = (low + high) / 2
        if refutes_gdp(canaries, guesses, right, middle, failure):
            low = middle
        else:
            high = middle
    return low
