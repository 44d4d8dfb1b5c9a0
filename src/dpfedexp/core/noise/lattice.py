"""Whole numbers instead of floats: sums and noise on one lattice, so that no low bit of a release tells what it was added to.

The step of a lattice is a power of two, so dividing by it and multiplying with it are exact. Values are truncated toward zero, so
a vector in the ball of radius C stays in it. float64 is exact below 2⁵³, and `check_room` refuses anything that could come near.

A mask splits a client's row x into x − m mod 2⁶⁴ and the 256-bit seed of m, ChaCha20's key stream as little-endian words. Either
part alone is uniform and tells nothing of x. Sums of both parts add to the sum of the rows, in uint64, which wraps around.
"""

import math
import secrets
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.core.noise import Noise
from dpfedexp.core.noise.chacha import key_stream
from dpfedexp.errors import InputError, require

Words = NDArray[np.uint64]

BITS = 20
"""Rounded noise has a standard deviation of 2^20 to 2^21 steps: fine enough to lose nothing, and coarse enough that sampling in
double precision reaches every step, in the tails too."""

STRICT_BITS = 30
"""Discrete noise has 2^30 to 2^31 steps, where it is Gaussian for every purpose of accounting, up to `STRICT_EXCESS`."""

STRICT_EXCESS = 2.0**-20
"""How much more than the Gaussian's μ strict noise is charged, as a fraction; docs/security.md has the proof and its range."""

PIECE = 2**18
"""Numbers that are converted at a time on a CPU: they stay in its cache, and are enough for every thread."""

_EXACT = 2.0**52

SEED_BYTES = 32
NONCE = b"dpfedexp-2p1"
"""ChaCha20's 96-bit nonce for masks. A seed is used once, so it may be constant; it separates this use of a key from any other."""
MOST_WORDS = 2**32
"""The key stream of one seed: ChaCha20's 32-bit counter of 64-byte blocks reaches eight times as far."""


def step_for(deviation: float, strict: bool = False) -> float:
    """The lattice's step for noise of this standard deviation: 2^BITS of them, or up to twice as many, make one deviation.

    >>> step_for(1.5) == 2.0**-20
    True
    """
    require(0 < deviation < math.inf, f"the noise has standard deviation {deviation}; it must be a positive number.")
    return 2.0 ** (math.frexp(deviation)[1] - 1 - (STRICT_BITS if strict else BITS))


def truncate(values: Tensor, step: float) -> Tensor:
    """How many steps fit into each value, toward zero, as int64."""
    return (values.double() / step).to(torch.int64)


def truncated_sum(rows: Tensor, step: float) -> Tensor:
    """Σ over the rows of what `truncate` leaves of them, [width] float64: exact, where `check_room` was asked.

    A piece of the rows at a time, which stays in the processor's cache. −0 is made 0: the sign of a zero would tell of a value that
    was truncated.
    """
    made = torch.empty(rows.shape[1], dtype=torch.float64, device=rows.device)
    piece = max(1, PIECE // max(1, len(rows))) if rows.device.type == "cpu" else max(1, rows.shape[1])
    for part, into in zip(rows.split(piece, 1), made.split(piece), strict=True):
        torch.sum((part.double() / step).trunc_(), 0, out=into).mul_(step).add_(0.0)
    return made


def check_room(count: int, bound: float, step: float) -> None:
    """Whether the sum of so many contributions can be held exactly."""
    require(
        count * (bound / step) < _EXACT,
        f"the sum of {count} clients needs more than 52 bits on the lattice of secure noise; use more noise or fewer clients.",
    )


def add_noise(
    values: Tensor, step: float, deviation: float, noise: Noise, strict: bool = False, row: int = 0
) -> Tensor:
    """Values on the lattice plus noise on the lattice, [n, width] float64; `row` is the first row of `noise` that is taken.

    Formal guarantee: the output is the rounding of (value + N(0, deviation²)), because a whole number of steps moves through the
    rounding unchanged; so it is post-processing of the ideal release. Strict noise is the discrete Gaussian itself.
    """
    units = values / step
    if not torch.equal(units, units.round()):
        raise InputError(
            "the sums are not on the lattice of secure noise; all of them must come from a secure mechanism."
        )
    # One representable number up, so that rounding of the quotient never makes the noise smaller.
    scale = math.nextafter(deviation / step, math.inf)
    if strict:
        drawn = discrete_gaussian(units.shape, scale).to(units.device)
    else:
        rows = torch.arange(row, row + len(units))
        drawn = noise.normal(rows, units.shape[1], units.device, torch.float64).mul(scale).round_()
    return units.add_(drawn).mul_(step)


@lru_cache(maxsize=64)
def _discrete(scale: float) -> Callable[[list[int]], list[int]]:
    try:
        import opendp.prelude as dp
    except ModuleNotFoundError:
        raise InputError("strict noise needs OpenDP; install it with: pip install 'dpfedexp[secure]'.") from None
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    return dp.m.make_gaussian(*space, scale)


def discrete_gaussian(shape: Sequence[int], scale: float) -> Tensor:
    """Independent whole numbers k with probability proportional to exp(−k²/(2·scale²)), as float64.

    The exact discrete Gaussian (Canonne, Kamath, Steinke 2020), sampled by OpenDP with rational arithmetic and system entropy.
    """
    drawn = _discrete(scale)([0] * math.prod(shape))
    return torch.tensor(drawn, dtype=torch.float64).reshape(tuple(shape))


def fresh_seed() -> bytes:
    """256 bits from the operating system, for one row: a second row under the same seed would give away their difference."""
    return secrets.token_bytes(SEED_BYTES)


def expand(seed: bytes, width: int) -> Words:
    """The mask of a seed: `width` words."""
    require(len(seed) == SEED_BYTES, f"a seed has {len(seed)} bytes; it must have {SEED_BYTES}.")
    require(1 <= width <= MOST_WORDS, f"a mask of {width} words is asked for; it must have 1 to {MOST_WORDS}.")
    return np.frombuffer(key_stream(seed, NONCE).update(bytes(8 * width)), dtype="<u8").astype(np.uint64, copy=False)


def hide(row: Words, seed: bytes) -> Words:
    """What the server gets: the row minus the mask of the seed, mod 2⁶⁴."""
    return row - expand(seed, len(row))


def to_words(units: Tensor) -> Words:
    """Whole numbers (int64) as words mod 2⁶⁴."""
    return units.detach().cpu().contiguous().numpy().view(np.uint64)


def from_words(words: Words) -> Tensor:
    """Words as the whole numbers from −2⁶³ to 2⁶³ − 1 that they stand for, int64."""
    return torch.from_numpy(np.ascontiguousarray(words, dtype=np.uint64).view(np.int64).copy())


def masked_sum(units: Tensor) -> Tensor:
    """Σ of the rows [n, w] by way of both aggregators: each row is hidden under a mask of its own, and both parts are added up.

    The result is the sum itself, mod 2⁶⁴, whatever the seeds are.
    """
    server, helper = (np.zeros(units.shape[1], dtype=np.uint64) for _ in range(2))
    for row in to_words(units):
        seed = fresh_seed()
        server += hide(row, seed)
        helper += expand(seed, len(row))
    return from_words(server + helper).to(units.device)
