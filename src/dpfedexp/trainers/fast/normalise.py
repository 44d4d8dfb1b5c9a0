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
        variance, mean = torch.var_mean(x.reshape(n, self.groups, -1, s), dim=2, correction=0)
        scale = torch.rsqrt(variance.float() + self.eps)
        a, mean = self._of_channels(scale, channels), self._of_channels(mean.float(), channels)
        # (x − mean)·scale·weight + bias as a·x + b: the image is read once and written once.
        if self.affine:
            a = a * params[0].float().unsqueeze(-1)
        b = -mean * a
        if self.affine:
            b = b + params[1].float().unsqueeze(-1)
        images = x.reshape(n, channels, -1, s)
        y = torch.addcmul(b.to(x.dtype).unsqueeze(2), images, a.to(x.dtype).unsqueeze(2))
        return y.view(x.shape), (images, mean, scale)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        images, mean, scale = saved
        n, channels, s = dy.shape[0], dy.shape[1], dy.shape[-1]
        rows = dy.reshape(n, channels, -1, s)
        scale = self._of_channels(scale, channels)
        # All that the gradient needs of the image: per channel and sample, Σ dy and Σ dy·(x − mean)·scale.
        plain = rows.sum(2, dtype=torch.float32)
        along = ((rows * images).sum(2, dtype=torch.float32) - mean * plain) * scale
        grads: list[Tensor] = []
        weight = torch.ones_like(plain)
        if self.affine:
            grads = [along.sum(-1).to(params[0].dtype), plain.sum(-1).to(params[1].dtype)]
            weight = params[0].float().unsqueeze(-1)
        if not wanted:
            return grads, (None,)
        plain, along = (self._means(weight * part, rows.shape[2]) for part in (plain, along))
        of_dy, of_x = weight * scale, -scale * scale * along
        rest = -scale * plain - of_x * mean
        of_dy, of_x, rest = (part.to(dy.dtype).unsqueeze(2) for part in (of_dy, of_x, rest))
        dx = torch.addcmul(rest, rows, of_dy).addcmul_(images, of_x)
        return grads, (dx.view(dy.shape),)

    def _of_channels(self, values: Tensor, channels: int) -> Tensor:
        """[n, groups, s] as [n, channels, s]."""
        return values.repeat_interleave(channels // self.groups, dim=1)

    def _means(self, sums: Tensor, pixels: int) -> Tensor:
        """Sums of channels, [n, channels, s], to the means of their groups, each at all channels of the group."""
        channels = sums.shape[1]
        of_groups = sums.unflatten(1, (self.groups, -1)).sum(2) / (pixels * (channels // self.groups))
        return self._of_channels(of_groups, channels)


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
