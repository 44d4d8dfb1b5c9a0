"""Pooling over windows that do not overlap, and over whole images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.trainers.fast.convolution import award, compete
from dpfedexp.trainers.fast.ops import Gradients, Saved
from dpfedexp.trainers.fast.window import Pair


def _windows(x: Tensor, pool: Pair) -> Tensor:
    """[n, c, h, w, s] as [n, c, rows, ph, columns, pw, s], a view of what the windows read."""
    rows, columns = x.shape[2] // pool[0], x.shape[3] // pool[1]
    read = x[:, :, : rows * pool[0], : columns * pool[1]]
    windows: Tensor = read.unflatten(3, (columns, pool[1])).unflatten(2, (rows, pool[0]))
    return windows


@dataclass(frozen=True)
class MaxPool:
    """The largest of every window; ties go to the first in reading order."""

    pool: Pair

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        windows = _windows(x, self.pool)
        values = [windows[:, :, :, i, :, j] for i in range(self.pool[0]) for j in range(self.pool[1])]
        best, wins = compete(values)
        return best.contiguous(), (wins, x.shape)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        wins, shape = saved
        dx = torch.zeros(shape, dtype=dy.dtype, device=dy.device)
        windows = _windows(dx, self.pool)
        places = [windows[:, :, :, i, :, j] for i in range(self.pool[0]) for j in range(self.pool[1])]
        award(dy, wins, places)
        return (), (dx,)


@dataclass(frozen=True)
class MeanPool:
    """The mean of every window."""

    pool: Pair

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        return _windows(x, self.pool).mean((3, 5)), x.shape

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        dx = torch.zeros(saved, dtype=dy.dtype, device=dy.device)
        share = dy / (self.pool[0] * self.pool[1])
        _windows(dx, self.pool).copy_(share[:, :, :, None, :, None].expand_as(_windows(dx, self.pool)))
        return (), (dx,)


@dataclass(frozen=True)
class GlobalMeanPool:
    """The mean of the whole image, kept as a 1×1 image."""

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        return x.mean((2, 3), keepdim=True), x.shape

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), ((dy / (saved[2] * saved[3])).expand(saved),)
