"""Convolution as one matrix product per client: patches of the input times the client's own kernels.

A max-pool after a convolution is part of the product. The four outputs that a 2×2 window compares come from one patch that is one
row and one column larger, so the client's kernels are shifted copies in a larger, partly empty matrix. This is several times
faster, because patches are read a quarter as often.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfedexp.machine import has_triton
from dpfedexp.trainers.fast.ops import Gradient, Gradients, Saved

Pair = tuple[int, int]


@dataclass(frozen=True)
class Window:
    """The geometry of patches: `size` rows and columns with spacing `dilation`, one patch every `stride` pixels."""

    size: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)

    def span(self, axis: int) -> int:
        return (self.size[axis] - 1) * self.dilation[axis] + 1

    def outputs(self, height: int, width: int) -> Pair:
        axes = enumerate(zip((height, width), self.padding, self.stride, strict=True))
        rows, columns = ((length + 2 * pad - self.span(i)) // stride + 1 for i, (length, pad, stride) in axes)
        return rows, columns

    def padded(self, height: int, width: int) -> Pair:
        return height + 2 * self.padding[0], width + 2 * self.padding[1]

    @property
    def is_one_pixel(self) -> bool:
        return self.size == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0)

    def pooled(self, pool: Pair) -> "Window":
        """The window that contains all patches that one pool window compares."""
        rows, columns = (self.span(i) + (pool[i] - 1) * self.stride[i] for i in (0, 1))
        step = (self.stride[0] * pool[0], self.stride[1] * pool[1])
        return Window((rows, columns), step, self.padding)


@dataclass(frozen=True)
class Patches:
    """Unfold [n, c, h, w, s] to [n, c·kh·kw, rows, columns, s]; without parameters, so patches of the data are made only once."""

    window: Window

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        w = self.window
        shape = x.shape
        if w.is_one_pixel:
            return x, shape
        if (own := _own_kernels(x, w, shape)) is not None:
            return own.unfolded(x, w), shape
        if w.padding != (0, 0):
            x = F.pad(x, (0, 0, w.padding[1], w.padding[1], w.padding[0], w.padding[0]))
        x = x.contiguous()
        n, c, _, _, s = x.shape
        a = x.stride()
        rows, columns = w.outputs(shape[2], shape[3])
        view = x.as_strided(
            (n, c, *w.size, rows, columns, s),
            (a[0], a[1], a[2] * w.dilation[0], a[3] * w.dilation[1], a[2] * w.stride[0], a[3] * w.stride[1], a[4]),
        )
        return view.reshape(n, c * w.size[0] * w.size[1], rows, columns, s), shape

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        n, c, height, width, s = saved
        w = self.window
        if w.is_one_pixel:
            return (), (dy,)
        if (own := _own_kernels(dy, w, saved)) is not None:
            return (), (own.folded(dy, w, height, width),)
        padded = w.padded(height, width)
        if dy.device.type == "cpu":
            dx = torch.zeros(n, c, padded[0] * padded[1], s, dtype=dy.dtype)
            dx.index_add_(2, _positions(w, height, width), dy.reshape(n, c, -1, s))
            dx = dx.view(n, c, *padded, s)
        else:
            dx = self._scatter(dy.reshape(n, c, *w.size, *w.outputs(height, width), s), padded)
        top, left = w.padding
        return (), (dx[:, :, top : top + height, left : left + width],)

    def _scatter(self, dy: Tensor, padded: Pair) -> Tensor:
        """Add patches back to the image by shifts, columns first: in a fixed order, which a GPU's index_add does not guarantee."""
        n, c, kh, kw, rows, columns, s = dy.shape
        w = self.window
        wide = torch.zeros(n, c, kh, rows, padded[1], s, dtype=dy.dtype, device=dy.device)
        for k in range(kw):
            at = k * w.dilation[1]
            wide[:, :, :, :, at : at + (columns - 1) * w.stride[1] + 1 : w.stride[1]] += dy[:, :, :, k]
        dx = torch.zeros(n, c, *padded, s, dtype=dy.dtype, device=dy.device)
        for k in range(kh):
            at = k * w.dilation[0]
            dx[:, :, at : at + (rows - 1) * w.stride[0] + 1 : w.stride[0]] += wide[:, :, k]
        return dx


def _own_kernels(values: Tensor, window: Window, image: Sequence[int]) -> ModuleType | None:
    """The module of triton kernels for patches, if the GPU has triton and the kernels support the window; otherwise None."""
    if not values.is_cuda or not has_triton():
        return None
    from dpfedexp.trainers.fast import kernels

    return kernels if kernels.unfolds(window, *image[2:]) else None


@lru_cache(maxsize=64)
def _positions(window: Window, height: int, width: int) -> Tensor:
    """The index of the pixel in the padded image, for every row of a patch matrix and every position."""
    padded, (down, right), (dy, dx) = window.padded(height, width), window.dilation, window.stride
    pixel = torch.arange(padded[0] * padded[1]).view(padded)
    strides = (padded[1] * down, right, padded[1] * dy, dx)
    return pixel.as_strided((*window.size, *window.outputs(height, width)), strides).reshape(-1)


@dataclass(frozen=True)
class Contract:
    """Kernels [n, o, c, kh, kw] times patches [n, c·kh·kw, rows, columns, s]."""

    bias: bool

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (patches,) = inputs
        y = torch.bmm(params[0].flatten(2), patches.flatten(2))
        if self.bias:
            y.add_(params[1].unsqueeze(2))
        return y.view(*y.shape[:2], *patches.shape[2:]), patches

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        kernel = params[0].flatten(2)
        rows = dy.flatten(2)
        patches = saved.flatten(2)

        def of_kernel() -> Tensor:
            if dy.is_cuda:
                found = torch.bmm(rows, patches.transpose(1, 2))
            else:
                # A CPU's matrix product takes half the time with the longer side first.
                found = torch.bmm(patches, rows.transpose(1, 2)).transpose(1, 2)
            return found.reshape(params[0].shape)

        grads: list[Gradient] = [of_kernel]
        if self.bias:
            grads.append(lambda: rows.sum(2))
        return grads, (torch.bmm(kernel.transpose(1, 2), rows).view(saved.shape) if wanted else None,)


@dataclass(frozen=True)
class ContractAndPool:
    """Convolution and non-overlapping max-pool in one operation: from patches of `window.pooled(pool)` to the pooled outputs.

    Among equal values the first position in reading order wins, as in torch's max-pool.
    """

    window: Window
    pool: Pair
    bias: bool

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (patches,) = inputs
        kernels = self._spread(params[0])
        y = torch.bmm(kernels, patches.flatten(2))
        # Compare the columns of all rows of the window first, then the rows: fewer and larger operations.
        rows, by_column = max_and_winners(y.view(len(y), *self.pool, params[0].shape[1], -1).unbind(2))
        best, by_row = max_and_winners(rows.unbind(1))
        if self.bias:
            best.add_(params[1].unsqueeze(2))
        return best.view(*best.shape[:2], *patches.shape[2:]), (patches, kernels, by_column, by_row)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        patches, kernels, by_column, by_row = saved
        dy = dy.flatten(2)
        rows = dy.new_empty(len(dy), self.pool[0], *dy.shape[1:])
        route_to_winners(dy, by_row, rows.unbind(1))
        spread = dy.new_empty(len(dy), *self.pool, *dy.shape[1:])
        route_to_winners(rows, by_column, spread.unbind(2))
        spread = spread.flatten(1, 3)
        grads = [self._gather(torch.bmm(patches.flatten(2), spread.transpose(1, 2)), params[0])]
        if self.bias:
            grads.append(dy.sum(2))
        return grads, (torch.bmm(kernels.transpose(1, 2), spread).view(patches.shape) if wanted else None,)

    def _spread(self, kernel: Tensor) -> Tensor:
        """The shifted copies of the kernels, [n, positions·o, c·rows·columns]."""
        n, o, c = kernel.shape[:3]
        padded = torch.cat([kernel.flatten(1), kernel.new_zeros(n, 1)], dim=1)
        spread, _ = _places(self.window, self.pool, o, c, kernel.device)
        return padded.index_select(1, spread).view(n, self.pool[0] * self.pool[1] * o, -1)

    def _gather(self, wide: Tensor, kernel: Tensor) -> Tensor:
        """The gradient of the kernels, from that of their shifted copies, [n, c·rows·columns, positions·o]."""
        n, o, c = kernel.shape[:3]
        _, gather = _places(self.window, self.pool, o, c, kernel.device)
        found = wide.flatten(1).index_select(1, gather)
        return found.view(n, self.pool[0] * self.pool[1], -1).sum(1).view(kernel.shape)


@lru_cache(maxsize=64)
def _places(window: Window, pool: Pair, o: int, c: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices: of each number of the shifted copies in the kernels [o, c, kh, kw], and of each kernel number in their gradient."""
    size = window.pooled(pool).size
    kernels = torch.arange(o * c * window.size[0] * window.size[1]).view(o, c, *window.size)
    copies = torch.full((pool[0], pool[1], o, c, *size), kernels.numel())
    numbers = torch.arange(c * size[0] * size[1] * pool[0] * pool[1] * o).view(c, *size, pool[0], pool[1], o)
    numbers = numbers.permute(3, 4, 5, 0, 1, 2)
    found = []
    for i in range(pool[0]):
        for j in range(pool[1]):
            down = slice(i * window.stride[0], i * window.stride[0] + window.span(0), window.dilation[0])
            right = slice(j * window.stride[1], j * window.stride[1] + window.span(1), window.dilation[1])
            copies[i, j, :, :, down, right] = kernels
            found.append(numbers[i, j, :, :, down, right].reshape(-1))
    return copies.view(-1).to(device), torch.cat(found).to(device)


def max_and_winners(values: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The elementwise maximum, and for each value after the first, 1.0 where it is larger than all before it."""
    if len(values) == 1:
        return values[0].clone(), []
    best, wins = values[0], []
    room = torch.empty_like(best, memory_format=torch.contiguous_format)
    for value in values[1:]:
        # Floats, because comparing into bytes and multiplying with them takes several times as long on a CPU.
        wins.append(torch.gt(value, best, out=torch.empty_like(room)))
        best = torch.maximum(best, value, out=room)
    return best, wins


def route_to_winners(dy: Tensor, wins: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Route `dy` to the winning value and zero to the others."""
    if not wins:
        out[0].copy_(dy)
    left = dy
    for number in range(len(wins), 0, -1):
        torch.mul(left, wins[number - 1], out=out[number])
        left = torch.sub(left, out[number], out=out[0])
