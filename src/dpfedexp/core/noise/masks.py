"""Masks mod 2⁶⁴: a vector of whole numbers split into two parts, each of which is uniform by itself.

A client's row x of whole numbers becomes x − m mod 2⁶⁴, where m is the ChaCha20 key stream of a fresh 256-bit seed read as
little-endian words of 64 bits. Whoever has the difference and not the seed sees uniform words; whoever has the seed and not the
difference sees nothing of x at all. Sums of both parts add to the sum of the rows, whatever the order of adding.

Arithmetic is that of uint64 in NumPy, which wraps around by definition.
"""

from __future__ import annotations

import secrets

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.core.noise.chacha import key_stream
from dpfedexp.errors import require

Words = NDArray[np.uint64]

SEED_BYTES = 32
NONCE = b"dpfedexp-2p1"
"""ChaCha20's 96-bit nonce for masks. A seed is used once, so it may be constant; it separates this use of a key from any other."""
MOST_WORDS = 2**32
"""The key stream of one seed: ChaCha20's 32-bit counter of 64-byte blocks reaches eight times as far."""


def fresh_seed() -> bytes:
    """256 bits from the operating system. A seed hides one row; hiding a second one with it would give away their difference."""
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
