"""Convolutions of many channels by torch's own library on a CPU, one client after the other.

Its kernels read every number from a cache many times, which patches can't: they are written and read once for every place of the
kernel. With few channels that matters less than the calls that many clients at once save.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfedexp.trainers.fast.ops import Gradients, Saved, aten
from dpfedexp.trainers.fast.window import Pair, Window


@dataclass(frozen=True)
class LibraryConvolve:
    """A convolution, and a max-pool of windows that do not overlap behind it where there is one.

    Args:
        window: of the kernels.
        bias: whether there is one.
        pool: the pooled windows, None for none.
    """

    window: Window
    bias: bool
    pool: Pair | None = None

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        kept, found = [], []
        for own, *given in zip(x, *params, strict=True):
            image = _images(own)
            y = torch.conv2d(image, given[0], given[1] if self.bias else None, *self._window)
            best, places = y, None
            if self.pool is not None:
                best, places = aten.max_pool2d_with_indices(y, self.pool, self.pool)
            kept.append((image, y if self.pool is not None else None, places))
            found.append(best)
        return _values(found), kept

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        found: list[tuple[Tensor | None, Tensor, Tensor | None]] = []
        for own, kernel, (image, y, places) in zip(dy, params[0], saved, strict=True):
            gradient = _images(own)
            if self.pool is not None:
                gradient = aten.max_pool2d_with_indices_backward(
                    gradient, y, self.pool, self.pool, (0, 0), (1, 1), False, places
                )
            sizes = [len(kernel)] if self.bias else None
            asked = (wanted, True, self.bias)
            found.append(
                aten.convolution_backward(gradient, image, kernel, sizes, *self._window, False, (0, 0), 1, asked)
            )
        of_inputs, of_kernels, of_biases = zip(*found, strict=True)
        grads = [torch.stack(of_kernels), *([torch.stack(of_biases)] if self.bias else [])]
        return grads, (_values(of_inputs) if wanted else None,)

    @property
    def _window(self) -> tuple[Any, Any, Any]:
        return self.window.stride, self.window.padding, self.window.dilation


def _images(values: Tensor) -> Tensor:
    """[c, h, w, s] as [s, c, h, w], channels last in memory: max-pools of torch's are many times quicker there."""
    return values.permute(3, 0, 1, 2).contiguous(memory_format=torch.channels_last)


def _values(images: Sequence[Tensor]) -> Tensor:
    """Clients' [s, c, h, w] as [n, c, h, w, s]."""
    s, *shape = images[0].shape
    out = images[0].new_empty(len(images), *shape, s)
    for own, image in zip(out, images, strict=True):
        own.copy_(image.permute(1, 2, 3, 0))
    return out
