"""Sums of float32 numbers in double precision on a GPU, in one reading of them; needs triton.

torch writes the numbers down in double precision first, twice their memory, and reads that. Every row is added up by programs of
its own, in an order that depends on its length alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE, BLOCK = 2**16, 2**11
"""Numbers of a row that one program adds up, and how many of them at a time."""
COLUMNS, AHEAD = 2**8, 16
"""Columns that one program adds up, and how many rows it has under way."""


@triton.jit
def _squares(x, parts, D, STRIDE, PIECES, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Σ of the squares of a piece of a row, which are exact in double precision."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * PIECE
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, PIECE, BLOCK):
        at = first + begin + tl.arange(0, BLOCK)
        value = tl.load(x + row * STRIDE + at, mask=at < D, other=0.0).to(tl.float64)
        sums += value * value
    tl.store(parts + row * PIECES + tl.program_id(1), tl.sum(sums, 0))


@triton.jit
def _add_up(parts, out, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros((BLOCK,), tl.float64)
    for begin in range(0, PIECES, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        sums += tl.load(parts + row * PIECES + at, mask=at < PIECES, other=0.0)
    tl.store(out + row, tl.sum(sums, 0))


@triton.jit
def _columns(x, out, N, D, STRIDE, COLUMNS: tl.constexpr, AHEAD: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((COLUMNS,), tl.float64)
    row = 0
    while row < N:
        # Added one after the other, but loaded together.
        for ahead in tl.static_range(AHEAD):
            there = (at < D) & (row + ahead < N)
            sums += tl.load(x + at, mask=there, other=0.0).to(tl.float64)
            x += STRIDE
        row += AHEAD
    tl.store(out + at, sums, mask=at < D)


def is_supported(x: Tensor) -> bool:
    """Whether these are rows for the kernels."""
    return x.is_cuda and x.dtype == torch.float32 and x.stride(1) == 1 and 0 < x.shape[1] < 2**31 - PIECE and len(x) > 0


def squared_norms(x: Tensor) -> Tensor:
    """Σ_j x_ij² of every row."""
    n, d = x.shape
    pieces = triton.cdiv(d, PIECE)
    parts = x.new_empty((n, pieces), dtype=torch.float64)
    _squares[(n, pieces)](x, parts, d, x.stride(0), pieces, PIECE, BLOCK)
    if pieces == 1:
        return parts[:, 0]
    out = x.new_empty(n, dtype=torch.float64)
    _add_up[(n,)](parts, out, pieces, 128)
    return out


def column_sums(x: Tensor) -> Tensor:
    """Σ_i x_ij of every column, the rows one after the other."""
    n, d = x.shape
    out = x.new_empty(d, dtype=torch.float64)
    _columns[(triton.cdiv(d, COLUMNS),)](x, out, n, d, x.stride(0), COLUMNS, AHEAD)
    return out
