"""Exact Gaussian differential privacy (GDP): conversions between μ, ε and δ.

A release is μ-GDP if telling neighbors apart is at least as hard as telling N(0, 1) from N(μ, 1). Gaussian queries are
exactly μ-GDP and compose exactly: the μ² add up (Dong, Roth, Su 2022). With a = μ/2 − ε/μ,

    δ(ε) = Φ(a) − e^ε Φ(a − μ) = ½ e^{−a²/2} [erfcx(−a/√2) − erfcx((μ − a)/√2)],

and the second form has no large exponents, so it does not overflow at any ε. All formulas in this module are exact.
"""

import math
from collections.abc import Iterable

import numpy as np
from scipy.special import erfcx, log_ndtr, ndtr, ndtri

from dpfedexp.errors import checked, require

_SQRT2 = math.sqrt(2.0)
_LOG2 = math.log(2.0)


def delta(epsilon: float, mu: float) -> float:
    """Compute the smallest δ for which μ-GDP implies (ε, δ)-DP. ε may be negative (δ then exceeds 1 − e^ε)."""
    if mu == 0.0:
        return max(0.0, -math.expm1(epsilon))
    if math.isinf(mu):
        return 1.0
    return 0.0 if math.isinf(epsilon) else math.exp(_log_delta(mu / 2 - epsilon / mu, mu))


def deltas(epsilons: np.ndarray, mu: float) -> np.ndarray:
    """Compute δ for an array of ε of either sign, for a finite μ above 0."""
    a = mu / 2 - epsilons / mu
    values: np.ndarray = np.clip(ndtr(a) - np.exp(epsilons + log_ndtr(a - mu)), 0.0, 1.0)
    return values


def epsilon(mu: float, delta: float) -> float:
    """Compute the smallest ε ≥ 0 for which μ-GDP implies (ε, δ)-DP; infinite at δ = 0."""
    if mu == 0.0 or delta >= 1.0:
        return 0.0
    if math.isinf(mu) or delta <= 0.0:
        return math.inf
    if delta >= advantage(mu):
        return 0.0
    from scipy.optimize import brentq

    target = math.log(delta)
    # Solving for a rather than ε keeps the bracket a few units wide at any ε: δ ≤ Φ(a) bounds a below, ε ≥ 0 above.
    a = brentq(lambda x: _log_delta(x, mu) - target, float(ndtri(delta)) - 1e-9, mu / 2, xtol=1e-15, rtol=1e-15)
    return max(0.0, mu * (mu / 2 - float(a)))


def compose(mus: Iterable[float]) -> float:
    """Return μ = √(Σ μᵢ²) of releases that are μᵢ-GDP, also if each is chosen after seeing the earlier ones."""
    return math.hypot(*mus)


def advantage(mu: float) -> float:
    """The largest (true positive rate − false positive rate) of any test between neighbors: 2Φ(μ/2) − 1."""
    return math.erf(mu / (2.0 * _SQRT2))


def _log_delta(a: float, mu: float) -> float:
    """Compute log δ, which is finite even if δ is below the smallest float."""
    far = float(erfcx((mu - a) / _SQRT2))
    if a > 0.0:
        # erfcx(−a/√2) overflows for a > 0; Φ(a) ≥ ½ is not small and can be computed directly.
        return math.log(max(float(ndtr(a)) - 0.5 * math.exp(-a * a / 2.0) * far, 5e-324))
    near = float(erfcx(-a / _SQRT2))
    return -a * a / 2.0 - _LOG2 + math.log(max(near - far, 5e-324))


FREE_THRESHOLD = (11.0 + 5.0 * math.sqrt(5.0)) / 8.0
"""The scalar query costs nothing iff (C·σ_v/σ_s)² is at most this number, 2.7725."""


@checked
def joint_mu(clip: float, vector_noise: float, scalar_noise: float) -> float:
    """Compute μ of the vector and the paper's scalar query, released jointly (replace-one, full participation).

    μ is sup over Δ, Δ' of √(‖Δ−Δ'‖²/σ_v² + (‖Δ‖²−‖Δ'‖²)²/σ_s²), with the noise stds σ_v, σ_s on the *sums*. Composing the two
    queries separately charges for both worst cases at once, but the vector changes most (2C) exactly if the two norms are equal.

    The result is exact, in closed form. Antiparallel vectors maximize the first term and leave the second unchanged, and scaling
    both until the longer has norm C increases both terms. So with b the other norm over C and ρ = (C·σ_v/σ_s)², μ is
    (C/σ_v)·√max h(b) for h(b) = (1+b)²(1 + ρ(1−b)²). The derivative of h vanishes where 2ρ·b(1−b) = 1: the smaller root is
    the only maximum inside (0, 1), and h(1) = 4 is the vector alone. Both maxima are equal at ρ = (11+5√5)/8.
    """
    for name, value in (("clip", clip), ("vector_noise", vector_noise), ("scalar_noise", scalar_noise)):
        require(value >= 0.0, f"{name} is {value}; it must be zero or more.")
    if clip == 0.0:
        return 0.0
    if vector_noise == 0.0 or scalar_noise == 0.0:
        return math.inf
    rho = (clip * (vector_noise / scalar_noise)) ** 2
    if rho <= FREE_THRESHOLD:
        return 2.0 * clip / vector_noise
    b = 1.0 / (rho * (1.0 + math.sqrt(1.0 - 2.0 / rho)))
    return (clip / vector_noise) * (1.0 + b) * math.sqrt(1.0 + rho * (1.0 - b) ** 2)
