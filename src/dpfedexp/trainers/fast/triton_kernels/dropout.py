"""Dropout on a GPU in one pass over memory, with the masks of `trainers/forward/draws.py`; needs triton.

A mask takes torch a dozen passes over numbers of 64 bits, and one more to use it. Here it is hashed where it is used, and on the
way back again instead of being kept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _drop(
    x, rows, y, share, below, COUNT, PLACES, INNER, S,
    GOLDEN: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr, ROWS_LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one client's values: `share` times those whose word is not below `below`, 0 in the place of the others."""
    blocks = tl.cdiv(COUNT, BLOCK)
    client = (tl.program_id(0) // blocks).to(tl.int64)
    at = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    live = at < COUNT
    if ROWS_LAST:
        row = at % S
        place = at // S
    else:
        row = at // PLACES
        place = at % PLACES
    z = tl.load(rows + client * S + row, mask=live, other=0) + (place // INNER).to(tl.int64) * GOLDEN
    z = (z ^ ((z >> 32) & 0xFFFFFFFF)) * FIRST
    z = (z ^ ((z >> 29) & 0x7FFFFFFFF)) * SECOND
    value = tl.load(x + client * COUNT + at, mask=live, other=0.0).to(tl.float32)
    kept = tl.where(z >= below, value * share, 0.0)
    tl.store(y + client * COUNT + at, kept.to(y.dtype.element_ty), mask=live)


def dropped(
    x: Tensor, rows: Tensor, below: int, share: float, constants: tuple[int, int, int], inner: int = 1
) -> Tensor:
    """[n, …, s] with 0 where a word is below a number, and `share` times as much elsewhere.

    Args:
        x: in memory as it is, or with the samples before everything else of a client.
        rows: the words of the samples, [n, s].
        below: what a kept place's word is not.
        share: the factor of what is kept.
        constants: of the hash.
        inner: how many neighbouring places share one word.
    """
    last = x.is_contiguous()
    if not last and not x.movedim(-1, 1).is_contiguous():
        x, last = x.contiguous(), True
    y = torch.empty_like(x)
    n, s = rows.shape
    count = x[0].numel()
    grid = (n * triton.cdiv(count, BLOCK),)
    _drop[grid](x, rows, y, share, below, count, count // s, inner, s, *constants, last, BLOCK)
    return y
