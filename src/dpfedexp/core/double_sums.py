"""Sums of float32 numbers in double precision on a GPU, in one pass over memory; needs triton.

torch would first write a copy in double precision, which takes twice the memory, and then read the copy. These kernels add every
row in programs of its own, in an order that depends on the row's length alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE, BLOCK = 2**16, 2**11
"""How many numbers of a row one program adds, and how many of them at a time."""
COLUMNS, AHEAD = 2**8, 16
"""How many columns one program adds, and how many rows it loads at a time."""


@triton.jit
def _squares(x, parts, D, STRIDE, PIECES, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """Add the squares of a piece of a row; squares of float32 numbers are exact in double precision."""
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
        # Loaded together, but added in the order of the rows.
        for ahead in tl.static_range(AHEAD):
            there = (at < D) & (row + ahead < N)
            sums += tl.load(x + at, mask=there, other=0.0).to(tl.float64)
            x += STRIDE
        row += AHEAD
    tl.store(out + at, sums, mask=at < D)


def is_supported(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and x.stride(1) == 1 and 0 < x.shape[1] < 2**31 - PIECE and len(x) > 0


def squared_norms(x: Tensor) -> Tensor:
    """Σ_j x_ij² of every row, [n] in float64."""
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
    """Σ_i x_ij of every column, [d] in float64, added in the order of the rows."""
    n, d = x.shape
    out = x.new_empty(d, dtype=torch.float64)
    _columns[(triton.cdiv(d, COLUMNS),)](x, out, n, d, x.stride(0), COLUMNS, AHEAD)
    return out
