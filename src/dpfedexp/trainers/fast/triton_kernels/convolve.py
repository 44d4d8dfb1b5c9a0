"""Convolution on a GPU's matrix units without patches, in bfloat16; needs triton.

A patch matrix is as many times the image as the kernel has taps, is written once and read by every product. Here the rows of the
product's tile are read from the image where the tap stands, so that only images and kernels go through memory. The gradient of the
input is a convolution of the outputs' gradient by turned kernels. Sums are float32, in the same order on every run and for every
client alone. In tf32 the matrix units want the samples of a tile in another order than memory has them, and nothing is gained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfedexp.trainers.fast.convolution import Patches
from dpfedexp.trainers.fast.ops import Gradients, Later, Saved, Unsupported
from dpfedexp.trainers.fast.window import Window

MOST_OUTPUTS = 128
"""Beyond it the products of patches are as fast, and need no kernels of ours."""
MOST_NUMBERS = 2**31
"""Places within a client's images are numbers of 32 bits."""


@triton.jit
def _places(
    at, PART, H, W, ROWS, COLUMNS, EVEN: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr,
):  # fmt: skip
    """Of numbers of an output's plane [rows, columns, s]: row and column of their windows, their sample, and which there are.

    EVEN numbers, a power of two that divides s, lie together wherever the tap stands, and are read together.
    """
    unit = at // EVEN
    row = unit // (COLUMNS * PART)
    column = unit // PART % COLUMNS
    return row * SH, column * SW, unit % PART * EVEN + at % EVEN, unit < ROWS * COLUMNS * PART


@triton.jit
def _convolve(
    x, w, y, PART, H, W, ROWS, COLUMNS, TOP, LEFT, BLOCKS,
    TURNED: tl.constexpr, FILTERS: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Outputs [n, o, rows·columns·s] of images [n, c, h·w·s] and kernels [n, taps, o, c], for one client and a tile of them.

    With TURNED the kernels lie as [n, taps, c, o], last tap first.
    """
    outputs = tl.cdiv(FILTERS, BO)
    client = (tl.program_id(0) // (outputs * BLOCKS)).to(tl.int64)
    o = tl.program_id(0) % outputs * BO + tl.arange(0, BO)
    at = tl.program_id(0) // outputs % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    row, column, sample, live = _places(at, PART, H, W, ROWS, COLUMNS, EVEN, SH, SW)
    image = x + client * C * (H * W * PART * EVEN)
    kernels = w + client * (KH * KW * FILTERS * C)
    total = tl.zeros((BO, BLOCK), tl.float32)
    parts: tl.constexpr = (C + BC - 1) // BC
    for k in range(KH * KW * parts):
        tap = k // parts
        c = k % parts * BC + tl.arange(0, BC)
        down = row + tap // KW * DH - TOP
        right = column + tap % KW * DW - LEFT
        inside = live & (down >= 0) & (down < H) & (right >= 0) & (right < W)
        place = (down * W + right) * (PART * EVEN) + sample
        if TURNED:
            kernel = kernels + (KH * KW - 1 - tap) * (FILTERS * C) + c[None, :] * FILTERS + o[:, None]
        else:
            kernel = kernels + tap * (FILTERS * C) + o[:, None] * C + c[None, :]
        factors = tl.load(kernel, mask=(o < FILTERS)[:, None] & (c < C)[None, :], other=0.0)
        values = tl.load(
            image + c[:, None] * (H * W * PART * EVEN) + place[None, :],
            mask=(c < C)[:, None] & inside[None, :],
            other=0.0,
        )
        total = tl.dot(factors, values, total, input_precision="tf32")
    to = y + (client * FILTERS + o[:, None]) * (ROWS * COLUMNS * PART * EVEN) + at[None, :]
    tl.store(to, total.to(y.dtype.element_ty), mask=(o < FILTERS)[:, None] & live[None, :])


@triton.jit
def _of_kernels(
    x, dy, dw, PART, H, W, ROWS, COLUMNS, TOP, LEFT,
    BLOCKS: tl.constexpr, FILTERS: tl.constexpr, C: tl.constexpr, EVEN: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    BO: tl.constexpr, BC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The kernels' gradient [n, o, c, taps] for one client, one tap and a tile of outputs and channels."""
    tap = tl.program_id(0) % (KH * KW)
    left = tl.program_id(0) // (KH * KW)
    o = left % tl.cdiv(FILTERS, BO) * BO + tl.arange(0, BO)
    left = left // tl.cdiv(FILTERS, BO)
    c = left % tl.cdiv(C, BC) * BC + tl.arange(0, BC)
    client = (left // tl.cdiv(C, BC)).to(tl.int64)
    plane = ROWS * COLUMNS * PART * EVEN
    image = x + (client * C + c[:, None]) * (H * W * PART * EVEN)
    gradient = dy + (client * FILTERS + o[:, None]) * plane
    total = tl.zeros((BO, BC), tl.float32)
    for block in range(BLOCKS):
        at = block * BLOCK + tl.arange(0, BLOCK)
        row, column, sample, live = _places(at, PART, H, W, ROWS, COLUMNS, EVEN, SH, SW)
        down = row + tap // KW * DH - TOP
        right = column + tap % KW * DW - LEFT
        inside = live & (down >= 0) & (down < H) & (right >= 0) & (right < W)
        place = (down * W + right) * (PART * EVEN) + sample
        values = tl.load(image + place[None, :], mask=(c < C)[:, None] & inside[None, :], other=0.0)
        factors = tl.load(gradient + at[None, :], mask=(o < FILTERS)[:, None] & (at < plane)[None, :], other=0.0)
        total = tl.dot(factors, tl.trans(values), total, input_precision="tf32")
    to = dw + ((client * FILTERS + o[:, None]) * C + c[None, :]) * (KH * KW) + tap
    tl.store(to, total, mask=(o < FILTERS)[:, None] & (c < C)[None, :])


@dataclass(frozen=True)
class RoundedConvolve:
    """`Patches` and `Contract` in one, with products by the matrix units; windows of any kind."""

    window: Window
    bias: bool

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        x = inputs[0].contiguous()
        kernels = params[0].permute(0, 3, 4, 1, 2).contiguous()
        y = convolved(x, kernels, self.window)
        if self.bias:
            y.add_(params[1][:, :, None, None, None])
        return y, (x, kernels)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        x, kernels = saved
        dy = dy.contiguous()
        grads: list[Tensor | Later] = [Later(lambda: of_kernels(x, dy, self.window))]
        if self.bias:
            grads.append(Later(lambda: dy.flatten(2).sum(2, dtype=torch.float32)))
        return grads, (self._of_image(params[0], kernels, x, dy) if wanted else None,)

    def _of_image(self, kernel: Tensor, kernels: Tensor, x: Tensor, dy: Tensor) -> Tensor:
        w = self.window
        if w.stride == (1, 1):
            around = (w.span(0) - 1 - w.padding[0], w.span(1) - 1 - w.padding[1])
            return convolved(dy, kernels, Window(w.size, padding=around, dilation=w.dilation), turned=True)
        patches = torch.bmm(kernel.flatten(2).transpose(1, 2), dy.flatten(2))
        shape = (len(dy), -1, *dy.shape[2:])
        (dx,) = Patches(w).backward((), x.shape, patches.view(shape), True)[1]
        return dx  # type: ignore[return-value]


def convolved(x: Tensor, kernels: Tensor, window: Window, *, turned: bool = False) -> Tensor:
    """Images [n, c, h, w, s] by kernels [n, kh, kw, o, c], or turned ones [n, kh, kw, c, o]."""
    outputs = kernels.shape[4 if turned else 3]
    rows, columns = window.outputs(x.shape[2], x.shape[3])
    y = x.new_empty(len(x), outputs, rows, columns, x.shape[4])
    if max(x[0].numel(), y[0].numel()) >= MOST_NUMBERS:
        raise Unsupported("a client's images have more numbers than the kernel can count")
    few = outputs <= 64
    tile = {"BO": _fit(outputs, 128), "BC": _fit(x.shape[1], 32 if few else 64)}
    block = 256 if few else 128
    blocks = triton.cdiv(y[0, 0].numel(), block)
    _convolve[(len(x) * triton.cdiv(outputs, tile["BO"]) * blocks,)](
        x,
        kernels,
        y,
        **_sizes(x, (rows, columns), window),
        TURNED=turned,
        FILTERS=outputs,
        C=x.shape[1],
        BLOCKS=blocks,
        **tile,
        BLOCK=block,
        num_warps=4,
        num_stages=3 if few else 2,
    )
    return y


def of_kernels(x: Tensor, dy: Tensor, window: Window) -> Tensor:
    """The gradient [n, o, c, kh, kw] in float32, from images and the outputs' gradient."""
    outputs, channels = dy.shape[1], x.shape[1]
    dw = x.new_empty((len(x), outputs, channels, *window.size), dtype=torch.float32)
    few = outputs <= 64
    tile = {"BO": _fit(outputs, 128), "BC": _fit(channels, 32 if few else 64)}
    block = 128 if few else 64
    taps = window.size[0] * window.size[1]
    grid = (len(x) * triton.cdiv(outputs, tile["BO"]) * triton.cdiv(channels, tile["BC"]) * taps,)
    _of_kernels[grid](
        x,
        dy,
        dw,
        **_sizes(x, dy.shape[2:4], window),
        FILTERS=outputs,
        C=channels,
        BLOCKS=triton.cdiv(dy[0, 0].numel(), block),
        **tile,
        BLOCK=block,
        num_warps=4,
        num_stages=3 if few else 4,
    )
    return dw


def suits(outputs: int) -> bool:
    """Where patches are read by few rows of kernels, memory is what a product waits for; with many it is the matrix units."""
    return outputs <= MOST_OUTPUTS


def _sizes(x: Tensor, outputs: Sequence[int], window: Window) -> dict[str, Any]:
    even = math.gcd(x.shape[4], 16 // x.itemsize)
    return {
        "PART": x.shape[4] // even,
        "H": x.shape[2],
        "W": x.shape[3],
        "ROWS": outputs[0],
        "COLUMNS": outputs[1],
        "TOP": window.padding[0],
        "LEFT": window.padding[1],
        "EVEN": even,
        **dict(
            zip(("KH", "KW", "SH", "SW", "DH", "DW"), (*window.size, *window.stride, *window.dilation), strict=True)
        ),
    }


def _fit(size: int, most: int) -> int:
    """Rows of a tile: a power of two that matrix units take."""
    power: int = triton.next_power_of_2(size)
    return min(most, max(16, power))
