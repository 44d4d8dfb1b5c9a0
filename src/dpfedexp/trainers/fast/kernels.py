"""Triton kernels for patches and GroupNorm, in one or two passes over memory each; triton comes with torch for CUDA.

torch computes the address of every element when it copies a strided view, and needs a pass for each tap, and for the mean, the
variance, the difference, the factor and the sums of a normalization. All sums of these kernels are float32, in the same order in
every run and separately for every client.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

Window = Any
"""`convolution.Window`; that module imports this one."""
MOST_TAPS = 64
"""The most taps of a window: sums over taps are unrolled, and more would take long to compile."""
TILE = 2048
"""How many numbers a program of GroupNorm holds at a time."""


@triton.jit
def _unfold(
    x, y, H, W, S, ROWS, COLUMNS, TOP, LEFT,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Unfold [images, h·w·s] to [images, taps, rows·columns·s], for one image and a tile of rows and (column, sample), tap by tap.

    Consecutive taps read nearly the same memory, which is still cached.
    """
    tiles = tl.cdiv(COLUMNS * S, RIGHT)
    every = tl.cdiv(ROWS, DOWN) * tiles
    image = (tl.program_id(0) // every).to(tl.int64)
    tile = tl.program_id(0) % every
    row = (tile // tiles * DOWN + tl.arange(0, DOWN))[:, None]
    at = (tile % tiles * RIGHT + tl.arange(0, RIGHT))[None, :]
    live = (row < ROWS) & (at < COLUMNS * S)
    source = x + image * H * W * S
    goal = y + image * (KH * KW) * ROWS * COLUMNS * S + row * (COLUMNS * S) + at
    for tap in range(KH * KW):
        height = row * SH + tap // KW * DH - TOP
        shift = tap % KW * DW - LEFT
        place = at + shift * S if SW == 1 else (at // S * SW + shift) * S + at % S
        inside = live & (height >= 0) & (height < H) & (place >= 0) & (place < W * S)
        values = tl.load(source + height * (W * S) + place, mask=inside, other=0)
        tl.store(goal, values, mask=live)
        goal += ROWS * COLUMNS * S


@triton.jit
def _fold(
    dy, dx, H, W, S, ROWS, COLUMNS, TOP, LEFT,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Add up [images, taps, rows·columns·s] to [images, h·w·s], for one image and a tile of rows and (column, sample)."""
    tiles = tl.cdiv(W * S, RIGHT)
    every = tl.cdiv(H, DOWN) * tiles
    image = (tl.program_id(0) // every).to(tl.int64)
    tile = tl.program_id(0) % every
    height = (tile // tiles * DOWN + tl.arange(0, DOWN))[:, None]
    at = (tile % tiles * RIGHT + tl.arange(0, RIGHT))[None, :]
    total = tl.zeros((DOWN, RIGHT), tl.float32)
    for a in tl.static_range(KH):
        for e in tl.static_range(KW):
            up = height + TOP - a * DH
            if SW == 1:
                place = at + (LEFT - e * DW) * S
                meets = (place >= 0) & (place < COLUMNS * S)
            else:
                left = at // S + LEFT - e * DW
                place = left // SW * S + at % S
                meets = (left >= 0) & (left % SW == 0) & (left // SW < COLUMNS)
            meets = meets & (up >= 0) & (up % SH == 0) & (up // SH < ROWS)
            source = dy + (image * (KH * KW) + a * KW + e) * ROWS * COLUMNS * S
            total += tl.load(source + up // SH * (COLUMNS * S) + place, mask=meets, other=0.0).to(tl.float32)
    live = (height < H) & (at < W * S)
    tl.store(dx + image * H * W * S + height * (W * S) + at, total.to(dx.dtype.element_ty), mask=live)


def unfolded(x: Tensor, window: Window) -> Tensor:
    """Unfold [n, c, h, w, s] to [n, c·kh·kw, rows, columns, s], with zeros beyond the edge."""
    given, x = x.dtype, _widened(x.contiguous())
    n, c, height, width, s = x.shape
    rows, columns = window.outputs(height, width)
    y = x.new_empty(n, c * window.size[0] * window.size[1], rows, columns, s)
    tile, tiles = _tiles(rows, columns * s)
    _unfold[(n * c * tiles,)](x, y, height, width, s, rows, columns, *window.padding, *_taps(window), *tile)
    return y.view(given)


def folded(dy: Tensor, window: Window, height: int, width: int) -> Tensor:
    """The gradient [n, c, h, w, s] of the input of `unfolded`, from that of its output."""
    dy = dy.contiguous()
    n, planes, rows, columns, s = dy.shape
    dx = dy.new_empty(n, planes // (window.size[0] * window.size[1]), height, width, s)
    tile, tiles = _tiles(height, width * s)
    _fold[(n * dx.shape[1] * tiles,)](dy, dx, height, width, s, rows, columns, *window.padding, *_taps(window), *tile)
    return dx


def unfolds(window: Window, height: int, width: int, s: int) -> bool:
    """Whether the kernels support a window: few enough taps to unroll, and indices within an image that fit 32 bits."""
    return window.size[0] * window.size[1] <= MOST_TAPS and 4 * height * width * s < 2**31


def _widened(x: Tensor) -> Tensor:
    """View several samples as one whole number, so that they are moved together: fewer, longer reads and writes."""
    wide = next((kind for kind in (torch.int64, torch.int32) if x.shape[-1] * x.itemsize % kind.itemsize == 0), x.dtype)
    return x.view(wide) if x.data_ptr() % wide.itemsize == 0 and wide.itemsize > x.itemsize else x


def _taps(window: Window) -> tuple[int, ...]:
    return (*window.size, *window.stride, *window.dilation)


def _tiles(rows: int, length: int) -> tuple[tuple[int, int], int]:
    """The tile of a program, 2048 numbers with little padding, and the number of tiles that cover rows of this length."""
    widths = [width for width in (256, 128, 64, 32) if length >= 0.8 * width * triton.cdiv(length, width)]
    right = widths[0] if widths else 32
    down = min(2048 // right, triton.next_power_of_2(rows))
    return (down, right), triton.cdiv(rows, down) * triton.cdiv(length, right)


@triton.jit
def _normalize(
    x, weight, bias, y, means, scales, PART, eps, A: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr,
    AFFINE: tl.constexpr,
    BA: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compute outputs, means and 1/√(variance + ε) of one client and group, for a block of samples."""
    S = PART * EVEN
    line = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    across = sample[None, None, :]
    source = x + line * A * P * S
    # Subtract one of the numbers first, which limits cancellation in the squares.
    near = tl.load(source + sample, mask=sample < S, other=0.0).to(tl.float32)
    sums = tl.zeros((BA, BP, BS), tl.float32)
    squares = tl.zeros((BA, BP, BS), tl.float32)
    for first in range(0, A, BA):
        a = first + tl.arange(0, BA)[:, None, None]
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)[None, :, None]
            live = (a < A) & (p < P) & (across < S)
            value = tl.load(source + (a * P + p) * S + across, mask=live, other=0.0).to(tl.float32)
            off = tl.where(live, value - near[None, None, :], 0.0)
            sums += off
            squares += off * off
    off = tl.sum(tl.sum(sums, 0), 0) / (A * P)
    variance = tl.maximum(tl.sum(tl.sum(squares, 0), 0) / (A * P) - off * off, 0.0)
    mean = near + off
    scale = 1.0 / tl.sqrt(variance + eps)
    tl.store(means + line * S + sample, mean, mask=sample < S)
    tl.store(scales + line * S + sample, scale, mask=sample < S)
    of = line * A
    for first in range(0, A, BA):
        a = first + tl.arange(0, BA)[:, None, None]
        factor = tl.load(weight + of + a, mask=a < A, other=0.0).to(tl.float32) if AFFINE else 1.0
        shift = tl.load(bias + of + a, mask=a < A, other=0.0).to(tl.float32) if AFFINE else 0.0
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)[None, :, None]
            live = (a < A) & (p < P) & (across < S)
            at = (a * P + p) * S + across
            value = tl.load(source + at, mask=live, other=0.0).to(tl.float32)
            result = (value - mean[None, None, :]) * scale[None, None, :] * factor + shift
            tl.store(y + line * A * P * S + at, result.to(y.dtype.element_ty), mask=live)


@triton.jit
def _normalize_back(
    x, dy, weight, means, scales, dx, of_weight, of_bias, PART, A: tl.constexpr, P: tl.constexpr, EVEN: tl.constexpr,
    AFFINE: tl.constexpr, WANTED: tl.constexpr,
    BA: tl.constexpr, BP: tl.constexpr, BS: tl.constexpr,
):  # fmt: skip
    """Compute the input's gradient, and this block's part of the gradients of weight and bias, [n, groups, blocks, a]."""
    S = PART * EVEN
    line = tl.program_id(0).to(tl.int64)
    sample = tl.program_id(1) * BS + tl.arange(0, BS)
    across = sample[None, None, :]
    here = line * A * P * S
    mean = tl.load(means + line * S + sample, mask=sample < S, other=0.0)[None, None, :]
    scale = tl.load(scales + line * S + sample, mask=sample < S, other=0.0)[None, None, :]
    of = line * A
    part = (line * tl.num_programs(1) + tl.program_id(1)) * A
    plain = tl.zeros((BS,), tl.float32)
    along = tl.zeros((BS,), tl.float32)
    for first in range(0, A, BA):
        a = first + tl.arange(0, BA)[:, None, None]
        factor = tl.load(weight + of + a, mask=a < A, other=0.0).to(tl.float32) if AFFINE else 1.0
        sums = tl.zeros((BA, BP, BS), tl.float32)
        products = tl.zeros((BA, BP, BS), tl.float32)
        for begin in range(0, P, BP):
            p = begin + tl.arange(0, BP)[None, :, None]
            live = (a < A) & (p < P) & (across < S)
            at = here + (a * P + p) * S + across
            normal = (tl.load(x + at, mask=live, other=0.0).to(tl.float32) - mean) * scale
            gradient = tl.load(dy + at, mask=live, other=0.0).to(tl.float32)
            sums += gradient
            products += gradient * normal
        rows = tl.sum(sums, 1)
        inner = tl.sum(products, 1)
        row = first + tl.arange(0, BA)
        if AFFINE:
            tl.store(of_weight + part + row, tl.sum(inner, 1), mask=row < A)
            own = tl.load(weight + of + row, mask=row < A, other=0.0).to(tl.float32)[:, None]
            tl.store(of_bias + part + row, tl.sum(rows, 1), mask=row < A)
            rows *= own
            inner *= own
        plain += tl.sum(rows, 0)
        along += tl.sum(inner, 0)
    if WANTED:
        level = (plain / (A * P))[None, None, :]
        slope = (along / (A * P))[None, None, :]
        for first in range(0, A, BA):
            a = first + tl.arange(0, BA)[:, None, None]
            factor = tl.load(weight + of + a, mask=a < A, other=0.0).to(tl.float32) if AFFINE else 1.0
            for begin in range(0, P, BP):
                p = begin + tl.arange(0, BP)[None, :, None]
                live = (a < A) & (p < P) & (across < S)
                at = here + (a * P + p) * S + across
                normal = (tl.load(x + at, mask=live, other=0.0).to(tl.float32) - mean) * scale
                gradient = tl.load(dy + at, mask=live, other=0.0).to(tl.float32)
                result = (gradient * factor - level - normal * slope) * scale
                tl.store(dx + at, result.to(dx.dtype.element_ty), mask=live)


Saved = tuple[Tensor, Tensor, Tensor]
"""The inputs [n, groups, a, p, s], and their means and 1/√(variance + ε), [n, groups, s]."""


def normalized(
    x: Tensor, groups: int, eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Saved]:
    """GroupNorm of [n, channels, …, s], with a mean for every client, group and sample; returns the outputs and `Saved`."""
    y, s = torch.empty_like(x), x.shape[-1]
    lines = x.view(len(x), groups, x.shape[1] // groups, -1, s)
    means, scales = (x.new_empty((len(x), groups, s), dtype=torch.float32) for _ in range(2))
    blocks, grid, even = _blocks(lines)
    own = [x if part is None else part.contiguous() for part in (weight, bias)]
    sizes = (*lines.shape[2:4], even, weight is not None)
    _normalize[grid](x, *own, y, means, scales, s // even, eps, *sizes, *blocks)
    return y, (lines, means, scales)


def gradients(
    dy: Tensor, kept: Saved, weight: Tensor | None = None, bias: Tensor | None = None, *, wanted: bool = True
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of the inputs (None unless `wanted`), of weight and of bias; dy has the memory layout of the inputs."""
    x, means, scales = kept
    n, groups, a, p, s = x.shape
    blocks, grid, even = _blocks(x)
    dx = torch.empty_like(dy) if wanted else dy
    sums = [x.new_empty((n, groups, grid[1], a), dtype=torch.float32) for _ in range(2)]
    own, sizes = x if weight is None else weight.contiguous(), (a, p, even, weight is not None, wanted)
    _normalize_back[grid](x, dy, own, means, scales, dx, *sums, s // even, *sizes, *blocks)
    of_weight, of_bias = (part.sum(2).view(n, -1) for part in sums)
    return dx if wanted else None, of_weight, of_bias


def _blocks(x: Tensor) -> tuple[tuple[int, int, int], tuple[int, int], int]:
    """The tile of a program, the grid of programs, and a power of two that divides s, the number of samples moved together."""
    n, groups, a, p, s = x.shape
    samples = min(64, triton.next_power_of_2(s))
    places = min(TILE // samples, triton.next_power_of_2(p))
    rows = min(TILE // (samples * places), triton.next_power_of_2(a))
    return (rows, places, samples), (n * groups, triton.cdiv(s, samples)), math.gcd(s, 16)
