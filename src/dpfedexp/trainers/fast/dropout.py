"""Dropout in a fast program: the masks of `trainers/forward/draws.py`, in the layout of the program's values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from dpfedexp.trainers.fast.ops import Gradients, Saved
from dpfedexp.trainers.forward.draws import dropout_mask, kept_share


@dataclass(frozen=True)
class Dropout:
    """y = x·mask/(1 − p) on [n, …, s], the mask being drawn from the clients' keys [n], the second input.

    Args:
        p: the share that is dropped.
        call: which of the draws of a pass this is, counted from 1 as `Drawing` counts.
        channels: whether whole channels are dropped.
    """

    p: float
    call: int
    channels: bool = False

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        x, keys = inputs
        lead = 2 if self.channels else x.dim() - 1
        shape = (x.shape[-1], *x.shape[1:lead], *[1] * (x.dim() - 1 - lead))
        mask = dropout_mask(keys, self.call, self.p, shape, x.dtype, rows_last=True) * kept_share(self.p)
        return x * mask, mask

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), (dy * saved if wanted else None, None)
