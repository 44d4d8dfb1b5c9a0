"""Convolution and max-pool on a GPU without patches in memory; needs triton, which torch brings along on CUDA.

Each client's kernels are small, so a product of matrices would leave most of a GPU idle and write patches many times the size of
the image. These kernels read the image itself, keep only the pooled outputs and which position won, and go backward through the
winners alone: a quarter of the arithmetic for a 2×2 pool. All sums are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfedexp.trainers.fast.ops import Gradients, Saved
from dpfedexp.trainers.fast.window import Pair, Window


@triton.jit
def _forward(
    x, w, b, y, won,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    FILTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Pooled outputs [n, filters, rows·columns, s] and which position won, for one client and a block of (position, sample)."""
    client = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = at % SAMPLES
    place = at // SAMPLES
    live = (sample < S) & (place < ROWS * COLUMNS)
    image = x + client * (C * H * W * S)
    base = ((place // COLUMNS) * (PH * SH * W) + (place % COLUMNS) * (PW * SW)) * S + sample
    output = tl.arange(0, OUTPUTS)
    kernel = w + client * (FILTERS * C * KH * KW) + output * (C * KH * KW)
    best = tl.full((OUTPUTS, BLOCK), float("-inf"), tl.float32)
    winner = tl.zeros((OUTPUTS, BLOCK), tl.int32)
    for i in tl.static_range(PH):
        for j in tl.static_range(PW):
            total = tl.zeros((OUTPUTS, BLOCK), tl.float32)
            for c in range(C):
                for a in tl.static_range(KH):
                    for e in tl.static_range(KW):
                        pixel = ((c * H + i * SH + a * DH) * W + j * SW + e * DW) * S
                        value = tl.load(image + base + pixel, mask=live, other=0.0).to(tl.float32)
                        factor = tl.load(kernel + (c * KH + a) * KW + e, mask=output < FILTERS, other=0.0).to(
                            tl.float32
                        )
                        total += factor[:, None] * value[None, :]
            wins = total > best
            best = tl.where(wins, total, best)
            winner = tl.where(wins, i * PW + j, winner)
    if BIAS:
        best += tl.load(b + client * FILTERS + output, mask=output < FILTERS, other=0.0).to(tl.float32)[:, None]
    to = (client * FILTERS + output)[:, None] * (ROWS * COLUMNS * S) + (place * S + sample)[None, :]
    mask = (output < FILTERS)[:, None] & live[None, :]
    tl.store(y + to, best.to(y.dtype.element_ty), mask=mask)
    tl.store(won + to, winner.to(tl.uint8), mask=mask)


@triton.jit
def _backward_kernel(
    x, dy, won, dw, db,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    FILTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BIAS: tl.constexpr, TAPS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one client's one kernel, over the winning patches alone."""
    client = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1)
    tap = tl.arange(0, TAPS)
    shift = ((tap // (KH * KW)) * H + (tap // KW) % KH * DH) * W + tap % KW * DW
    image = x + client * (C * H * W * S)
    from_here = (client * FILTERS + output) * (ROWS * COLUMNS * S)
    total = tl.zeros((TAPS, BLOCK), tl.float32)
    whole = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, ROWS * COLUMNS * SAMPLES, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sample = at % SAMPLES
        place = at // SAMPLES
        live = (sample < S) & (place < ROWS * COLUMNS)
        gradient = tl.load(dy + from_here + place * S + sample, mask=live, other=0.0).to(tl.float32)
        winner = tl.load(won + from_here + place * S + sample, mask=live, other=0).to(tl.int32)
        row = (place // COLUMNS * PH + winner // PW) * SH
        column = (place % COLUMNS * PW + winner % PW) * SW
        pixel = (row * W + column) * S + sample
        value = tl.load(
            image + pixel[None, :] + shift[:, None] * S, mask=(tap < C * KH * KW)[:, None] & live[None, :], other=0.0
        )
        total += value.to(tl.float32) * gradient[None, :]
        whole += gradient
    tl.store(dw + (client * FILTERS + output) * (C * KH * KW) + tap, tl.sum(total, 1), mask=tap < C * KH * KW)
    if BIAS:
        tl.store(db + client * FILTERS + output, tl.sum(whole, 0))


@triton.jit
def _backward_image(
    w, dy, won, dx,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    FILTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one client's images at a block of (pixel, sample): every tap asks whether its position won."""
    client = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = at % SAMPLES
    place = at // SAMPLES
    live = (sample < S) & (place < H * W)
    height = place // W
    width = place % W
    channel = tl.arange(0, CHANNELS)
    kernel = w + client * (FILTERS * C * KH * KW) + channel * (KH * KW)
    total = tl.zeros((CHANNELS, BLOCK), tl.float32)
    for a in tl.static_range(KH):
        for e in tl.static_range(KW):
            up = height - a * DH
            left = width - e * DW
            row = up // SH
            column = left // SW
            there = live & (up >= 0) & (left >= 0) & (up % SH == 0) & (left % SW == 0)
            there = there & (row < ROWS * PH) & (column < COLUMNS * PW)
            mine = row % PH * PW + column % PW
            pooled = (row // PH * COLUMNS + column // PW) * S + sample
            for o in range(FILTERS):
                read = (client * FILTERS + o) * (ROWS * COLUMNS * S) + pooled
                winner = tl.load(won + read, mask=there, other=255).to(tl.int32)
                gradient = tl.load(dy + read, mask=there & (winner == mine), other=0.0).to(tl.float32)
                factor = tl.load(kernel + o * (C * KH * KW) + a * KW + e, mask=channel < C, other=0.0).to(tl.float32)
                total += factor[:, None] * gradient[None, :]
    to = (client * C + channel)[:, None] * (H * W * S) + (place * S + sample)[None, :]
    tl.store(dx + to, total.to(dx.dtype.element_ty), mask=(channel < C)[:, None] & live[None, :])


def suits(window: Window, pool: Pair, outputs: int, channels: int) -> bool:
    """Small kernels only: beyond these sizes products of matrices keep a GPU busy, and registers run out here."""
    taps = channels * window.size[0] * window.size[1]
    return window.padding == (0, 0) and outputs <= 32 and channels <= 32 and taps <= 512 and pool[0] * pool[1] <= 16


@dataclass(frozen=True)
class ConvolveAndPool:
    """What `Patches` and `ContractAndPool` do together, from the image [n, c, h, w, s] itself."""

    window: Window
    pool: Pair
    bias: bool

    def _shape(self, kernel: Tensor, shape: Sequence[int]) -> dict[str, Any]:
        w = self.window
        rows, columns = w.pooled(self.pool).outputs(shape[2], shape[3])
        return {
            "C": shape[1], "H": shape[2], "W": shape[3], "S": shape[4],
            "FILTERS": kernel.shape[1], "ROWS": rows, "COLUMNS": columns,
            "KH": w.size[0], "KW": w.size[1], "SH": w.stride[0], "SW": w.stride[1], "DH": w.dilation[0], "DW": w.dilation[1],
            "PH": self.pool[0], "PW": self.pool[1], "SAMPLES": triton.next_power_of_2(shape[4]),
        }  # fmt: skip

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        x = inputs[0].contiguous()
        kernel = params[0].contiguous()
        sizes = self._shape(kernel, x.shape)
        y = x.new_empty(len(x), *(sizes[name] for name in ("FILTERS", "ROWS", "COLUMNS", "S")))
        won = torch.empty(y.shape, dtype=torch.uint8, device=x.device)
        self._convolve(x, kernel, params[1].contiguous() if self.bias else kernel, y, won, sizes)
        return y, (x, kernel, won)

    def _convolve(self, x: Tensor, kernel: Tensor, bias: Tensor, y: Tensor, won: Tensor, sizes: dict[str, Any]) -> None:
        outputs = triton.next_power_of_2(sizes["FILTERS"])
        # Four numbers of a sum to a thread, where there are threads enough: with more, registers run out.
        block, warps = 64, min(8, max(1, outputs // 2))
        grid = (len(x), triton.cdiv(sizes["ROWS"] * sizes["COLUMNS"] * sizes["SAMPLES"], block))
        _forward[grid](x, kernel, bias, y, won, **sizes, BIAS=self.bias, OUTPUTS=outputs, BLOCK=block, num_warps=warps)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        x, kernel, won = saved
        dy = dy.contiguous()
        sizes = self._shape(kernel, x.shape)
        n, o, c, s = len(x), sizes["FILTERS"], sizes["C"], sizes["SAMPLES"]
        dw = torch.empty(kernel.shape, device=x.device)
        db = torch.empty(n, o, device=x.device)
        taps = triton.next_power_of_2(c * sizes["KH"] * sizes["KW"])
        block = max(64, 4096 // taps)
        warps = 2 if taps >= 64 else 4
        _backward_kernel[(n, o)](x, dy, won, dw, db, **sizes, BIAS=self.bias, TAPS=taps, BLOCK=block, num_warps=warps)
        dx = None
        if wanted:
            dx = torch.empty_like(x)
            channels = triton.next_power_of_2(c)
            block = max(32, 1024 // channels)
            grid = (n, triton.cdiv(sizes["H"] * sizes["W"] * s, block))
            _backward_image[grid](kernel, dy, won, dx, **sizes, CHANNELS=channels, BLOCK=block, num_warps=1)
        return ([dw, db] if self.bias else [dw]), (dx,)
