"""Triton kernels for convolution and max-pool in one operation, without patches in memory; triton comes with torch for CUDA.

Each client's kernels are small, so a matrix product would leave most of a GPU idle and write patches many times the size of
the image. These kernels read the image itself, keep only the pooled outputs and which position won, and go backward through the
winners alone: a quarter of the arithmetic for a 2×2 pool.

In tf32 and bf16 the GPU's matrix units multiply: the kernels of one client, repeated for every position that a pool window
compares, are the rows of a matrix that multiplies the patch with all positions. All sums are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dpfedexp.trainers.fast.convolution import Pair, Window
from dpfedexp.trainers.fast.ops import Gradients, Saved
from dpfedexp.trainers.task import Precision


@triton.jit
def _forward(
    x, w, b, y, won,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    FILTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, BIAS: tl.constexpr, OUTPUTS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute pooled outputs [n, filters, rows·columns, s] and winning positions of a client, for a block of (position, sample)."""
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
    """Compute the gradient of one kernel of one client, from the winning patches alone."""
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
    """Compute the gradient of one client's images at a block of (pixel, sample): a tap counts if its position won."""
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


@dataclass(frozen=True)
class ConvolveAndPool:
    """`Patches` and `ContractAndPool` in one operation, computed from the image [n, c, h, w, s] itself."""

    window: Window
    pool: Pair
    bias: bool

    @staticmethod
    def is_supported(window: Window, pool: Pair, outputs: int, channels: int) -> bool:
        """Whether the kernels are small enough: larger ones run out of registers, and matrix products keep a GPU busy."""
        taps = channels * window.size[0] * window.size[1]
        return window.padding == (0, 0) and outputs <= 32 and channels <= 32 and taps <= 512 and pool[0] * pool[1] <= 16

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
        # Four numbers of a sum per thread, if there are enough threads: with more, registers run out.
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


@triton.jit
def _tap(
    row, column, position,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr, PW: tl.constexpr,
):  # fmt: skip
    """The tap that reads this row and column of the patch with the kernel at this position of the window, and whether one does."""
    down = row - position // PW * SH
    right = column - position % PW * SW
    there = (down >= 0) & (right >= 0) & (down % DH == 0) & (right % DW == 0)
    down = down // DH
    right = right // DW
    return down * KW + right, there & (down < KH) & (right < KW)


@triton.jit
def _rounded_forward(
    x, w, b, y, won,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    FILTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr, SAMPLES: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute pooled outputs [n, filters, rows·columns, s] and winning positions of a client, for a block of (position, sample)."""
    client = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = at % SAMPLES
    place = at // SAMPLES
    live = (sample < S) & (place < ROWS * COLUMNS)
    base = ((place // COLUMNS) * (PH * SH * W) + (place % COLUMNS) * (PW * SW)) * S + sample
    tap = tl.arange(0, TAPS)
    wide = tl.arange(0, WIDE)
    position = wide // OUTPUTS
    output = wide % OUTPUTS
    code, used = _tap((tap // RW)[None, :], (tap % RW)[None, :], position[:, None], KH, KW, SH, SW, DH, DW, PW)
    used = used & (tap < RH * RW)[None, :] & ((output < FILTERS) & (position < PH * PW))[:, None]
    kernel = w + client * (FILTERS * C * KH * KW) + output[:, None] * (C * KH * KW) + code
    patch = x + client * (C * H * W * S) + ((tap // RW * W + tap % RW) * S)[:, None] + base[None, :]
    inside = (tap < RH * RW)[:, None] & live[None, :]
    total = tl.zeros((WIDE, BLOCK), tl.float32)
    for c in range(C):
        factors = tl.load(kernel + c * (KH * KW), mask=used, other=0.0)
        values = tl.load(patch + c * (H * W * S), mask=inside, other=0.0)
        total = tl.dot(factors, values, total, input_precision="tf32")
    total = tl.where((position < PH * PW)[:, None], total, float("-inf"))
    best, winner = tl.max(tl.reshape(total, (WIDE // OUTPUTS, OUTPUTS, BLOCK)), axis=0, return_indices=True)
    output = tl.arange(0, OUTPUTS)
    if BIAS:
        best += tl.load(b + client * FILTERS + output, mask=output < FILTERS, other=0.0).to(tl.float32)[:, None]
    to = (client * FILTERS + output)[:, None] * (ROWS * COLUMNS * S) + (place * S + sample)[None, :]
    mask = (output < FILTERS)[:, None] & live[None, :]
    tl.store(y + to, best.to(y.dtype.element_ty), mask=mask)
    tl.store(won + to, winner.to(tl.uint8), mask=mask)


@triton.jit
def _rounded_backward_kernel(
    x, dy, won, parts,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    FILTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr, SAMPLES: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply patches by dy where they won, for one client and channel: parts [n, c, pixel, (pool position, filter)]."""
    client = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1)
    tap = tl.arange(0, TAPS)
    wide = tl.arange(0, WIDE)
    position = wide // OUTPUTS
    output = wide % OUTPUTS
    real = (output < FILTERS) & (position < PH * PW)
    image = x + (client * C + channel) * (H * W * S) + ((tap // RW * W + tap % RW) * S)[:, None]
    from_here = (client * FILTERS + output)[None, :] * (ROWS * COLUMNS * S)
    total = tl.zeros((TAPS, WIDE), tl.float32)
    for start in range(0, ROWS * COLUMNS * SAMPLES, BLOCK):
        at = start + tl.arange(0, BLOCK)
        sample = at % SAMPLES
        place = at // SAMPLES
        live = (sample < S) & (place < ROWS * COLUMNS)
        base = ((place // COLUMNS) * (PH * SH * W) + (place % COLUMNS) * (PW * SW)) * S + sample
        values = tl.load(image + base[None, :], mask=(tap < RH * RW)[:, None] & live[None, :], other=0.0)
        read = from_here + (place * S + sample)[:, None]
        mask = live[:, None] & real[None, :]
        winner = tl.load(won + read, mask=mask, other=255).to(tl.int32)
        gradient = tl.load(dy + read, mask=mask & (winner == position[None, :]), other=0.0)
        total = tl.dot(values, gradient, total, input_precision="tf32")
    to = parts + (client * C + channel) * (TAPS * WIDE)
    tl.store(to + tap[:, None] * WIDE + wide[None, :], total)


@triton.jit
def _fold(
    parts, dw,
    C: tl.constexpr, FILTERS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, RW: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDE: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one client's kernels: for each entry, sum its `parts` over all positions of the pool window."""
    client = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = at < FILTERS * C * KH * KW
    output = at // (C * KH * KW)
    channel = at // (KH * KW) % C
    a = at // KW % KH
    e = at % KW
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PH):
        for j in tl.static_range(PW):
            row = (client * C + channel) * TAPS + (a * DH + i * SH) * RW + e * DW + j * SW
            total += tl.load(parts + row * WIDE + (i * PW + j) * OUTPUTS + output, mask=live, other=0.0)
    tl.store(dw + client * (FILTERS * C * KH * KW) + at, total, mask=live)


@triton.jit
def _rounded_backward_image(
    w, dy, won, dx,
    C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
    FILTERS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, DH: tl.constexpr, DW: tl.constexpr,
    PH: tl.constexpr, PW: tl.constexpr, RH: tl.constexpr, RW: tl.constexpr, SAMPLES: tl.constexpr,
    OUTPUTS: tl.constexpr, WIDE: tl.constexpr, DOWN: tl.constexpr, RIGHT: tl.constexpr, PIXELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of one client's images, for a block of (cell, sample); a cell has the pixels of one window stride.

    The rows of the product are (channel, pixel of the cell); a cell is read by the windows that start in it and in the few cells
    above and to the left of it.
    """
    client = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    sample = at % SAMPLES
    place = at // SAMPLES
    up = place // tl.cdiv(W, PW * SW)
    left = place % tl.cdiv(W, PW * SW)
    live = (sample < S) & (up < tl.cdiv(H, PH * SH))
    pixel = tl.arange(0, PIXELS)
    channel = pixel // (DOWN * RIGHT)
    down = pixel // RIGHT % DOWN
    right = pixel % RIGHT
    inside = (channel < C) & (down < PH * SH) & (right < PW * SW)
    wide = tl.arange(0, WIDE)
    position = wide // OUTPUTS
    output = wide % OUTPUTS
    real = (output < FILTERS) & (position < PH * PW)
    kernel = w + client * (FILTERS * C * KH * KW) + (output * (C * KH * KW))[None, :] + (channel * (KH * KW))[:, None]
    each = tl.arange(0, OUTPUTS)
    compared = tl.arange(0, WIDE // OUTPUTS)
    total = tl.zeros((PIXELS, BLOCK), tl.float32)
    for k in tl.static_range((RH + PH * SH - 1) // (PH * SH)):
        for m in tl.static_range((RW + PW * SW - 1) // (PW * SW)):
            code, used = _tap(
                (down + k * PH * SH)[:, None], (right + m * PW * SW)[:, None], position[None, :], KH, KW, SH, SW, DH, DW, PW
            )  # fmt: skip
            factors = tl.load(kernel + code, mask=used & inside[:, None] & real[None, :], other=0.0)
            there = live & (up >= k) & (up - k < ROWS) & (left >= m) & (left - m < COLUMNS)
            read = (client * FILTERS + each)[:, None] * (ROWS * COLUMNS * S)
            read = read + (((up - k) * COLUMNS + left - m) * S + sample)[None, :]
            mask = there[None, :] & (each < FILTERS)[:, None]
            winner = tl.load(won + read, mask=mask, other=255).to(tl.int32)
            gradient = tl.load(dy + read, mask=mask, other=0.0)
            placed = tl.where(winner[None, :, :] == compared[:, None, None], gradient[None, :, :], 0.0)
            total = tl.dot(factors, tl.reshape(placed, (WIDE, BLOCK)), total, input_precision="tf32")
    height = up[None, :] * (PH * SH) + down[:, None]
    width = left[None, :] * (PW * SW) + right[:, None]
    to = ((client * C + channel[:, None]) * H + height) * (W * S) + width * S + sample[None, :]
    mask = inside[:, None] & live[None, :] & (height < H) & (width < W)
    tl.store(dx + to, total.to(dx.dtype.element_ty), mask=mask)


class RoundedConvolveAndPool(ConvolveAndPool):
    """`ConvolveAndPool` with products on the GPU's matrix units (tf32, bf16)."""

    @staticmethod
    def is_supported(window: Window, pool: Pair, outputs: int, channels: int) -> bool:
        """Whether windows and filters are small enough: the tiles of a triton program must fit its registers."""
        rows, columns = window.pooled(pool).size
        wide = triton.next_power_of_2(outputs) * triton.next_power_of_2(pool[0] * pool[1])
        return window.padding == (0, 0) and rows * columns <= 64 and wide <= 128 and channels <= 32

    def _shape(self, kernel: Tensor, shape: Sequence[int]) -> dict[str, Any]:
        rows, columns = self.window.pooled(self.pool).size
        outputs = triton.next_power_of_2(kernel.shape[1])
        wide = max(16, outputs * triton.next_power_of_2(self.pool[0] * self.pool[1]))
        return {**super()._shape(kernel, shape), "RH": rows, "RW": columns, "OUTPUTS": outputs, "WIDE": wide}

    def _convolve(self, x: Tensor, kernel: Tensor, bias: Tensor, y: Tensor, won: Tensor, sizes: dict[str, Any]) -> None:
        block = max(32, min(256, 8192 // sizes["WIDE"]))
        grid = (len(x), triton.cdiv(sizes["ROWS"] * sizes["COLUMNS"] * sizes["SAMPLES"], block))
        _rounded_forward[grid](
            x, kernel, bias, y, won, **sizes, TAPS=_taps(sizes), BIAS=self.bias, BLOCK=block, num_warps=2
        )

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        x, kernel, won = saved
        dy = dy.contiguous()
        sizes = self._shape(kernel, x.shape)
        n, c, wide, taps = len(x), sizes["C"], sizes["WIDE"], _taps(sizes)
        parts = torch.empty(n, c, taps, wide, device=x.device)
        _rounded_backward_kernel[(n, c)](x, dy, won, parts, **sizes, TAPS=taps, BLOCK=128, num_warps=1)
        grads = [torch.empty(kernel.shape, device=x.device)]
        unused = ("H", "W", "S", "ROWS", "COLUMNS", "RH", "SAMPLES")
        fold = {name: size for name, size in sizes.items() if name not in unused}
        block = min(256, triton.next_power_of_2(kernel[0].numel()))
        grid = (n, triton.cdiv(kernel[0].numel(), block))
        _fold[grid](parts, grads[0], **fold, TAPS=taps, BLOCK=block)
        if self.bias:
            grads.append(dy.flatten(2).sum(2, dtype=torch.float32))
        return grads, (self._of_image(x, kernel, won, dy, sizes) if wanted else None,)

    def _of_image(self, x: Tensor, kernel: Tensor, won: Tensor, dy: Tensor, sizes: dict[str, Any]) -> Tensor:
        dx = torch.empty_like(x)
        apart = (self.pool[0] * self.window.stride[0], self.pool[1] * self.window.stride[1])
        down, right = (triton.next_power_of_2(length) for length in apart)
        pixels = max(16, triton.next_power_of_2(sizes["C"]) * down * right)
        block = max(32, 4096 // pixels)
        cells = triton.cdiv(sizes["H"], apart[0]) * triton.cdiv(sizes["W"], apart[1])
        grid = (len(x), triton.cdiv(cells * sizes["SAMPLES"], block))
        warps = 2 if x.dtype == torch.float32 else 4
        _rounded_backward_image[grid](
            kernel, dy, won, dx, **sizes, DOWN=down, RIGHT=right, PIXELS=pixels, BLOCK=block, num_warps=warps
        )
        return dx


def _taps(sizes: dict[str, Any]) -> int:
    taps: int = triton.next_power_of_2(sizes["RH"] * sizes["RW"])
    return max(16, taps)


def pooled(
    window: Window, pool: Pair, bias: bool, outputs: int, channels: int, precision: Precision
) -> ConvolveAndPool | None:
    """The fused operation for a convolution and its max-pool; None where matrix products are faster."""
    if precision != "fp32" and RoundedConvolveAndPool.is_supported(window, pool, outputs, channels):
        return RoundedConvolveAndPool(window, pool, bias)
    supported = ConvolveAndPool.is_supported(window, pool, outputs, channels)
    return ConvolveAndPool(window, pool, bias) if supported else None
