"""GroupNorm and LayerNorm: every sample of every client is normalised by its own mean and variance."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.trainers.fast.ops import Gradients, Saved, Unsupported


def _standardise(x: Tensor, axis: int, eps: float) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(x, dim=axis, correction=0, keepdim=True)
    scale = torch.rsqrt(variance + eps)
    return (x - mean).mul_(scale), scale


def _through(dy: Tensor, normal: Tensor, scale: Tensor, axis: int) -> Tensor:
    """The gradient of (x − mean)·scale, from that of its output."""
    along = (dy * normal).mean(axis, keepdim=True)
    return (dy - dy.mean(axis, keepdim=True)).sub_(normal * along).mul_(scale)


@dataclass(frozen=True)
class GroupNorm:
    groups: int
    eps: float
    affine: bool

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        n, channels, s = x.shape[0], x.shape[1], x.shape[-1]
        normal, scale = _standardise(x.reshape(n, self.groups, -1, s), 2, self.eps)
        by_channel = normal.view(n, channels, -1, s)
        y = by_channel
        if self.affine:
            y = by_channel * params[0][:, :, None, None] + params[1][:, :, None, None]
        return y.view(x.shape), (normal, scale)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        normal, scale = saved
        n, channels, s = dy.shape[0], dy.shape[1], dy.shape[-1]
        rows = dy.reshape(n, channels, -1, s)
        grads: list[Tensor] = []
        if self.affine:
            grads = [(rows * normal.view_as(rows)).sum((2, 3)), rows.sum((2, 3))]
            rows = rows * params[0][:, :, None, None]
        dx = _through(rows.view_as(normal), normal, scale, 2).view(dy.shape) if wanted else None
        return grads, (dx,)


@dataclass(frozen=True)
class LayerNorm:
    shape: tuple[int, ...]
    eps: float
    affine: bool
    bias: bool

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        first = x.dim() - 1 - len(self.shape)
        if first < 1 or tuple(x.shape[first:-1]) != self.shape:
            raise Unsupported("a LayerNorm of another shape than its input's")
        lead = math.prod(x.shape[1:first])
        normal, scale = _standardise(x.reshape(x.shape[0], lead, -1, x.shape[-1]), 2, self.eps)
        y = normal
        if self.affine:
            y = y * params[0].flatten(1)[:, None, :, None]
        if self.bias:
            y = y + params[1].flatten(1)[:, None, :, None]
        return y.view(x.shape), (normal, scale)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        normal, scale = saved
        rows = dy.reshape(normal.shape)
        grads: list[Tensor] = []
        if self.affine:
            grads.append((rows * normal).sum((1, 3)).view_as(params[0]))
        if self.bias:
            grads.append(rows.sum((1, 3)).view_as(params[1]))
        if self.affine:
            rows = rows * params[0].flatten(1)[:, None, :, None]
        return grads, (_through(rows, normal, scale, 2).view(dy.shape) if wanted else None,)
