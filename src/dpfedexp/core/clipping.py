"""Clipping to the ball of radius C: a fixed clip, and an adaptive one (Andrew et al. 2021).

Formal guarantee: every row that `clip` returns has, in exact arithmetic, a norm of at most C, for any input, for C from
`SMALLEST_CLIP` to `LARGEST_CLIP`, rows of up to 10⁹ float32 or float64 numbers, with or without subnormal numbers.

Norms are taken in double precision, where squares of float32 numbers are exact and the sum of 10⁹ of them is off by less than
2⁻²³, so a norm by less than 2⁻²⁴. A row whose norm is at most C·(1 − 2⁻²⁴) is unchanged, so clipping twice is clipping once. A
longer row is scaled to C·(1 − 2⁻²²): the factor and each product are rounded by at most 2⁻²⁴, which with the norm's error uses
less than 3·2⁻²⁴ of the margin of 4·2⁻²⁴. The rest of the margin, C·2⁻²⁴, covers subnormal products, whose
rounding is off by up to 2⁻¹⁵⁰ in each of d coordinates: √d·2⁻¹⁵⁰ ≤ C·2⁻²⁴ for every C above 2⁻¹¹¹.
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpfedexp.errors import InputError, checked, is_number, require
from dpfedexp.machine import has_triton, run_on_threads

SHRINK = 1.0 - 2.0**-22
INSIDE = 1.0 - 2.0**-24
SMALLEST_CLIP, LARGEST_CLIP = 2.0**-64, 2.0**64
"""The range of C, in which C² and C·noise are far from overflow and underflow in float64, and C itself in float32."""
BLOCK = 2**16
"""How many numbers of a long row a CPU converts to double precision at a time: they fit its cache. With smaller blocks the
threads would wait for one another at Python's interpreter lock."""


def check_radius(name: str, radius: float) -> None:
    """Raise `InputError` for a radius outside the range for which the guarantee of `clip` is proven."""
    known = SMALLEST_CLIP <= radius <= LARGEST_CLIP
    require(known, f"{name} is {radius}; it must be a positive number from 2^-64 (5.4e-20) to 2^64 (1.8e19).")


@dataclass(frozen=True)
class Clipped:
    """vectors: the rows inside the ball; within: which rows were inside it before (not private on its own), on the CPU."""

    vectors: Tensor
    within: Tensor


def row_norms(x: Tensor) -> Tensor:
    """The norms of the rows in double precision. A row's norm does not depend on its position or on the other rows."""
    if x.is_cuda and has_triton():
        from dpfedexp.core import double_sums

        if double_sums.is_supported(x):
            return double_sums.squared_norms(x).sqrt()
    if x.device.type != "cpu" or x.shape[1] <= BLOCK:
        # A GPU adds a row in an order that depends on whether the row begins at a multiple of 16 bytes: pad so that all do.
        even = x.device.type == "cpu" or (x.shape[1] % 4 == 0 and x.is_contiguous() and x.data_ptr() % 16 == 0)
        rows = x if even else pad(x, (0, -x.shape[1] % 4))
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return norms
    squares = torch.zeros(len(x), dtype=torch.float64)

    def square(row: int) -> None:
        buffer, total = torch.empty(BLOCK, dtype=torch.float64), 0.0
        for block in x[row].split(BLOCK):
            wide = buffer[: len(block)].copy_(block)
            total += float(torch.dot(wide, wide))
        squares[row] = total

    # Every row on one thread, even a single row: a dot product on several threads may be added in another order.
    run_on_threads(square, range(len(x)), torch.get_num_threads(), always=True)
    return squares.sqrt()


def clip(updates: Tensor, radius: float, *, reuse: bool = False, norms: Tensor | None = None) -> Clipped:
    """Clip every row, Δ = min(C/‖Δ̃‖, 1)·Δ̃; a row that is not finite becomes 0 first, because min(C/nan, 1) would keep it.

    A row that is about 10³⁸ times too long becomes 0 too: C/‖Δ̃‖ would be subnormal in its type, and too coarse for the guarantee.
    An infinite radius clips nothing. With `reuse` the result may take the memory of `updates`. `norms` are the rows' norms, if the
    caller has them, in double precision and as exact as those of `row_norms`.
    """
    if radius != math.inf:
        check_radius("clip", radius)
    if updates.dtype not in (torch.float32, torch.float64):
        raise InputError(f"updates are of type {updates.dtype}; clipping is exact for float32 and float64 only.")
    # Moving one number per row to the CPU is faster than the many small GPU operations below.
    norms = (row_norms(updates) if norms is None else norms).cpu()
    inside = norms <= min(radius * INSIDE, torch.finfo(norms.dtype).max)
    if bool(inside.all()):
        return Clipped(updates, inside)
    bad = ~torch.isfinite(norms) | (norms * torch.finfo(updates.dtype).tiny > radius * SHRINK)
    if bool(bad.any()):
        updates = torch.where(bad.to(updates.device)[:, None], torch.zeros_like(updates), updates)
        norms = torch.where(bad, torch.zeros_like(norms), norms)
    if radius == math.inf:
        return Clipped(updates, torch.ones_like(norms, dtype=torch.bool))
    limit, outside = radius * SHRINK, norms > radius * INSIDE
    factor = torch.where(outside, limit / norms.clamp_min(limit), 1.0).to(updates.device, updates.dtype)[:, None]
    return Clipped(updates.mul_(factor) if reuse else updates * factor, norms <= radius)


def quantile_for(noise_norm: float) -> float:
    """The quantile 1/(1 + 4n), clamped to [0.2, 0.9], for noise of norm n in the mean update, in units of the clip.

    A small quantile shortens most updates, which biases the run where clients disagree; a large one makes the noise larger in
    proportion. With little noise nearly every update is left as it is; with n = 1/4 the clip is the median norm.

    >>> round(quantile_for(0.25), 3)
    0.5
    """
    return min(0.9, max(0.2, 1.0 / (1.0 + 4.0 * noise_norm)))


MAX_NOISE_MOVE = 0.1
"""The largest standard deviation by which noise may change the logarithm of an adaptive clip in a round. Without this limit the
clip of a hundred clients at a small ε is a random walk over orders of magnitude, and so is the length of the steps."""


@checked
@dataclass(frozen=True)
class AdaptiveClip:
    """A clip that follows a quantile of the update norms, estimated privately (Andrew et al. 2021, geometric update).

    The clip stays between `SMALLEST_CLIP` and `LARGEST_CLIP` for any noisy counts.

    count_noise is the standard deviation of the noise on the number of clients within the clip. `None` takes the larger of a
    twentieth of the cohort and 5 times the noise multiplier, which costs the update at most half a percent more noise at the same
    ε; with further votes it is `sums.default_noise`.

    rate is the largest speed of the clip: noise in the count moves the logarithm of the clip by rate times that noise in every
    round, so where it is large, the rate is lowered until this is `MAX_NOISE_MOVE`.

    quantile "auto", which `clip="adaptive"` uses, weighs the bias of a small clip against the noise of a large one before the
    first round, from public numbers (`quantile_for`).

    >>> AdaptiveClip(initial=1.0).update(1.0, noisy_fraction=0.5)
    1.0
    """

    initial: float = 1.0
    quantile: float | Literal["auto"] = 0.5
    rate: float = 0.5
    count_noise: float | None = None

    def __post_init__(self) -> None:
        check_radius("adaptive clip: initial", self.initial)
        require(
            self.quantile == "auto" or (is_number(self.quantile) and 0 < float(self.quantile) < 1),
            f"adaptive clip: quantile is {self.quantile!r}; it must be between 0 and 1, or 'auto'.",
        )
        require(0 < self.rate < math.inf, f"adaptive clip: rate is {self.rate}; it must be a positive number.")
        known = self.count_noise is None or 0 < self.count_noise < math.inf
        require(known, f"adaptive clip: count_noise is {self.count_noise}; it must be a positive number.")

    def update(self, radius: float, noisy_fraction: float) -> float:
        """The next clip, C·exp(−rate·(b̃ − quantile)) in the range; b̃ is the released fraction of clients within the clip."""
        if isinstance(self.quantile, str):
            raise InputError("adaptive clip: quantile is 'auto' and has no value yet; it gets one when a run starts.")
        move = -self.rate * (noisy_fraction - self.quantile)
        if math.isnan(move):
            return radius
        # e¹⁰⁰ exceeds the whole range and is far from overflow.
        moved = radius * math.exp(min(max(move, -100.0), 100.0))
        return min(max(moved, SMALLEST_CLIP), LARGEST_CLIP)

    def resolve(self, noise_norm: float | None, count_noise: float) -> Self:
        """Set what follows from public numbers: an automatic quantile, and a rate at which noise moves the clip little.

        Args:
            noise_norm: z√d/M, the norm of the noise in the mean update over the clip.
            count_noise: the standard deviation of the noise in the released fraction of clients within the clip.
        """
        quantile = quantile_for(noise_norm or 0.0) if self.quantile == "auto" else self.quantile
        return replace(self, quantile=quantile, rate=min(self.rate, MAX_NOISE_MOVE / max(count_noise, 1e-12)))
