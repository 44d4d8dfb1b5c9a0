"""The ball of radius C: fixed, and adaptive (Andrew et al. 2021).

Formal guarantee: every row that `clip` returns has, in exact arithmetic, a norm of at most C, whatever went in. Norms are taken
in double precision. A row longer than C·(1 − 2⁻²⁴) is scaled to C·(1 − 2⁻²²), which leaves room for the rounding of a float32
product; one that is shorter stays as it is, with room for the rounding of its norm, so clipping twice is clipping once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.errors import require

SHRINK = 1.0 - 2.0**-22
INSIDE = 1.0 - 2.0**-24
BLOCK = 2**16
"""Numbers of a long row that a CPU converts to double precision at a time: these still fit its cache."""


@dataclass(frozen=True)
class Clipped:
    """vectors: the rows inside the ball; within: which rows were inside it before (not private on its own)."""

    vectors: Tensor
    within: Tensor


def row_norms(x: Tensor) -> Tensor:
    """Norms of the rows in double precision."""
    if x.shape[1] <= BLOCK or x.device.type != "cpu":
        return torch.linalg.vector_norm(x, dim=1, dtype=torch.float64)
    squares = torch.zeros(len(x), dtype=torch.float64)
    for row, square in zip(x, squares, strict=True):
        for block in row.split(BLOCK):
            wide = block.double()
            square += torch.dot(wide, wide)
    return squares.sqrt()


def clip(updates: Tensor, radius: float, *, reuse: bool = False) -> Clipped:
    """Δ = min(C/‖Δ̃‖, 1)·Δ̃ row by row; a row that is not finite becomes 0 first, because min(C/nan, 1) would keep it.

    So does a row that is some 10³⁸ times too long: C/‖Δ̃‖ would be subnormal in its type, and too coarse to end inside the ball.
    With `reuse` the result may take the memory of `updates`.
    """
    norms = row_norms(updates)
    bad = ~torch.isfinite(norms) | (norms * torch.finfo(updates.dtype).tiny > radius * SHRINK)
    if bool(bad.any()):
        updates = torch.where(bad[:, None], torch.zeros_like(updates), updates)
        norms = torch.where(bad, torch.zeros_like(norms), norms)
    if math.isinf(radius):
        return Clipped(updates, torch.ones_like(norms, dtype=torch.bool))
    limit, outside = radius * SHRINK, norms > radius * INSIDE
    if not bool(outside.any()):
        return Clipped(updates, ~outside)
    factor = torch.where(outside, limit / norms.clamp_min(limit), 1.0).to(updates.dtype)[:, None]
    return Clipped(updates.mul_(factor) if reuse else updates * factor, norms <= radius)


@dataclass(frozen=True)
class AdaptiveClip:
    """The clip follows a quantile of the update norms, estimated privately (Andrew et al. 2021, geometric update).

    count_noise is the standard deviation on the number of clients within the clip. `None` takes the larger of a twentieth of the
    cohort and 5 times the noise multiplier, which costs the update at most half a per cent more noise at the same ε.

    >>> AdaptiveClip(initial=1.0).update(1.0, noisy_fraction=0.5)
    1.0
    """

    initial: float = 1.0
    quantile: float = 0.5
    rate: float = 0.5
    count_noise: float | None = None

    def __post_init__(self) -> None:
        require(
            self.initial > 0 and math.isfinite(self.initial),
            f"adaptive clip: initial is {self.initial}; it must be a positive number.",
        )
        require(0 < self.quantile < 1, f"adaptive clip: quantile is {self.quantile}; it must be between 0 and 1.")
        require(self.rate > 0, f"adaptive clip: rate is {self.rate}; it must be positive.")
        require(
            self.count_noise is None or self.count_noise > 0,
            f"adaptive clip: count_noise is {self.count_noise}; it must be positive.",
        )

    def update(self, radius: float, noisy_fraction: float) -> float:
        """C ← C·exp(−rate·(b̃ − quantile)), with b̃ the released fraction of clients within the clip."""
        return radius * math.exp(-self.rate * (noisy_fraction - self.quantile))

    def noise_for(self, cohort: float, noise_multiplier: float) -> float:
        return self.count_noise or max(cohort / 20.0, 5.0 * noise_multiplier)
