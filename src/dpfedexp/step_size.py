"""One function per equation of the paper, named after it, and the free rule.

Every function takes the mean square in its numerator (as the setting provides it) and c̄, and returns η_g. Only released values may
be passed in a private run; `target` is the exception, and is for simulations that are labelled non-private.
"""

from __future__ import annotations

import math

from torch import Tensor


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


def _ratio(numerator: float, c_bar: Tensor) -> float:
    """numerator/‖c̄‖²; a zero c̄ moves nothing, so its step size is 1."""
    denominator = float(c_bar.double().square().sum())
    ratio = numerator / denominator if denominator > 0 else 1.0
    return ratio if math.isfinite(ratio) else 1.0
