"""Patches of images and their gradient on a GPU, in one pass over memory each; needs triton, which torch brings along on CUDA.

torch's copy of a strided view works out every element's place by itself, and sums over taps need a pass for each. Here a tile of
rows and (column, sample) is read at one offset per tap: where windows move by one, neighbours stay neighbours. All sums are
float32, in the same order on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfedexp.trainers.fast.window import Window

MOST_TAPS = 64
"""The sums over taps are unrolled; a program with more is long to compile."""


@triton.jit
def _unfold(
    x, y, H, W, S, ROWS, COLUMNS, TOP, LEFT,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    DOWN: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """[images, h·w·s] to [images, taps, rows·columns·s], for one image and a tile of rows and (column, sample), tap by tap.

    What a tap reads was read for the one before it, and is still near.
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
    """[images, taps, rows·columns·s] added up to [images, h·w·s], for one image and a tile of rows and (column, sample)."""
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
    """[n, c, h, w, s] to [n, c·kh·kw, rows, columns, s], with zeros behind the edge."""
    given, x = x.dtype, _widened(x.contiguous())
    n, c, height, width, s = x.shape
    rows, columns = window.outputs(height, width)
    y = x.new_empty(n, c * window.size[0] * window.size[1], rows, columns, s)
    tile, tiles = _tiles(rows, columns * s)
    _unfold[(n * c * tiles,)](x, y, height, width, s, rows, columns, *window.padding, *_taps(window), *tile)
    return y.view(given)


def folded(dy: Tensor, window: Window, height: int, width: int) -> Tensor:
    """The gradient [n, c, h, w, s] of what `unfolded` took, from that of what it gave."""
    dy = dy.contiguous()
    n, planes, rows, columns, s = dy.shape
    dx = dy.new_empty(n, planes // (window.size[0] * window.size[1]), height, width, s)
    tile, tiles = _tiles(height, width * s)
    _fold[(n * dx.shape[1] * tiles,)](dy, dx, height, width, s, rows, columns, *window.padding, *_taps(window), *tile)
    return dx


def suits(window: Window, height: int, width: int, s: int) -> bool:
    """Whether the sums over taps are short enough to be unrolled, and places within an image are numbers of 32 bits."""
    return window.size[0] * window.size[1] <= MOST_TAPS and 4 * height * width * s < 2**31


def _widened(x: Tensor) -> Tensor:
    """The same bits as whole numbers of several samples each, which move together: fewer, longer reads and writes."""
    wide = next((kind for kind in (torch.int64, torch.int32) if x.shape[-1] * x.itemsize % kind.itemsize == 0), x.dtype)
    return x.view(wide) if x.data_ptr() % wide.itemsize == 0 and wide.itemsize > x.itemsize else x


def _taps(window: Window) -> tuple[int, ...]:
    return (*window.size, *window.stride, *window.dilation)


def _tiles(rows: int, length: int) -> tuple[tuple[int, int], int]:
    """The tile of a program, 2048 numbers with little of it outside, and how many cover rows of such a length."""
    widths = [width for width in (256, 128, 64, 32) if length >= 0.8 * width * triton.cdiv(length, width)]
    right = widths[0] if widths else 32
    down = min(2048 // right, triton.next_power_of_2(rows))
    return (down, right), triton.cdiv(rows, down) * triton.cdiv(length, right)
