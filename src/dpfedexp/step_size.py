"""One function per equation of the paper, named after it, then the free rule and the safe step.

Every rule takes the mean square in its numerator (as the setting provides it) and c̄, and returns η_g. Only released values may be
passed in a private run; `target` is the exception, and is for simulations that are labelled non-private. The safe step caps what a
rule says by what the released means of the last four rounds show (docs/step-size.md has the reasoning).
"""

from __future__ import annotations

import math

from torch import Tensor

GROWTH = 1.5
"""What the cap grows by in a round of progress. With `SHRINKAGE`, ln(3/2) + ln(1/2) < 0: signs that are noise lead back to 1."""
SHRINKAGE = 0.5
"""What the cap shrinks by in any other round, so that it is back at 1 after log₂ η_g of them."""
SHARPEST_TURN = -1 / math.sqrt(2)
"""135°. Once the signal is gone, the turn along an eigenvalue a of a quadratic is −aη/2, and `drift` is blind where it nears −1."""


def fedexp(mean_square: float, delta_bar: Tensor) -> float:
    """eq:step-size-fedexp: (1/M) Σ‖Δ_i‖² / ‖Δ̄‖², at least 1 by Jensen's inequality."""
    return _ratio(mean_square, delta_bar)


def naive(mean_square_c: float, c_bar: Tensor) -> float:
    """eq:naive: (1/M) Σ‖c_i‖² / ‖c̄‖². Biased by the noise's own energy dσ², which no number of clients averages out."""
    return _ratio(mean_square_c, c_bar)


def target(mean_square: float, c_bar: Tensor) -> float:
    """eq:optimal-eta-g: (1/M) Σ‖Δ_i‖² / ‖c̄‖². Not private: no server may compute it."""
    return _ratio(mean_square, c_bar)


def ldp_gaussian(mean_square_c: float, c_bar: Tensor, sigma: float) -> float:
    """eq:step-size-gaussian: max{1, ((1/M) Σ‖c_i‖² − dσ²) / ‖c̄‖²}."""
    return max(1.0, _ratio(mean_square_c - c_bar.numel() * sigma**2, c_bar))


def ldp_privunit(mean_s_hat: float, c_bar: Tensor) -> float:
    """eq:step-size-privunit: max{1, (1/M) Σ ŝ_i / ‖c̄‖²}."""
    return max(1.0, _ratio(mean_s_hat, c_bar))


def cdp(noisy_mean_square: float, c_bar: Tensor) -> float:
    """eq:step-size-cdp: max{1, ((1/M) Σ‖Δ_i‖² + ξ) / ‖c̄‖²}; the mechanism has added ξ already."""
    return max(1.0, _ratio(noisy_mean_square, c_bar))


def free(last_coordinate: float, c_bar: Tensor, clip: float) -> float:
    """max{1, (C² − C·ū_{d+1}) / ‖c̄‖²}, where u_i = (Δ_i, (C² − ‖Δ_i‖²)/C) lies in the same ball of radius C as Δ_i.

    The numerator is unbiased for (1/M) Σ‖Δ_i‖² and costs no privacy beyond that of the update itself.
    """
    return max(1.0, _ratio(clip * clip - clip * last_coordinate, c_bar))


def turn(c_bar: Tensor, before: Tensor) -> float:
    """cos(c_t, c_{t−1}): how sharply the released mean turns from one round to the next; 0 where one of them is zero.

    Args:
        c_bar: the released mean c_t.
        before: c_{t−1}.
    """
    return _cosine(c_bar.double(), before.double())


def drift(c_bar: Tensor, before: tuple[Tensor, Tensor, Tensor]) -> float:
    """cos(c_t + c_{t−1}, c_{t−2} + c_{t−3}): whether the sums of two moves, which no oscillation of period 2 enters, still agree.

    Args:
        c_bar: the released mean c_t.
        before: c_{t−1}, c_{t−2} and c_{t−3}; zeros for rounds that never were. With one round before, the cosine is that of `turn`.
    """
    one, two, three = (c.double() for c in before)
    if not bool(two.any() or three.any()):
        return _cosine(c_bar.double(), one)
    return _cosine(c_bar.double() + one, two + three)


def safe_cap(taken: float, turn: float, drift: float) -> float:
    """κ_t = η_{t−1}·(3/2 where drift_t > 0 and turn_t ≥ −1/√2, else 1/2).

    Args:
        taken: η_{t−1}, the step size of the round before; 1 before the first.
        turn: of this round.
        drift: of this round; a cosine that is not a number is no progress.
    """
    return taken * (GROWTH if drift > 0 and turn >= SHARPEST_TURN else SHRINKAGE)


def safe(eta_g: float, cap: float) -> float:
    """max{1, min{κ_t, η_g}}: never above the rule's own η_g where that is at least 1, never below DP-FedAvg's 1.

    Args:
        eta_g: what the rule says.
        cap: κ_t.
    """
    return max(1.0, min(cap, eta_g))


def _cosine(a: Tensor, b: Tensor) -> float:
    """The cosine of the angle between two vectors; 0 where one of them is zero."""
    norms = float(a.norm()) * float(b.norm())
    return float(a @ b) / norms if norms > 0 else 0.0


def _ratio(numerator: float, c_bar: Tensor) -> float:
    """numerator/‖c̄‖²; a zero c̄ moves nothing, so its step size is 1."""
    denominator = float(c_bar.double().square().sum())
    ratio = numerator / denominator if denominator > 0 else 1.0
    return ratio if math.isfinite(ratio) else 1.0
