"""Dropout in a fast program: the masks of `trainers/forward/draws.py`, in the layout of the program's values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.machine import has_triton
from dpfedexp.trainers.fast.ops import Gradients, Saved
from dpfedexp.trainers.forward.draws import CONSTANTS, dropout_mask, dropped_below, kept_share, row_words


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
        if x.is_cuda and has_triton() and self.p < 1 and x[0].numel() < 2**31:
            rows = row_words(keys, self.call, x.shape[-1])
            return self._by_triton(x, rows), rows
        shape = (x.shape[-1], *x.shape[1:lead], *[1] * (x.dim() - 1 - lead))
        mask = dropout_mask(keys, self.call, self.p, shape, x.dtype, rows_last=True) * kept_share(self.p)
        return x * mask, mask

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        if not wanted:
            return (), (None, None)
        by_triton = saved.dtype == torch.int64
        return (), (self._by_triton(dy, saved) if by_triton else dy * saved, None)

    def _by_triton(self, x: Tensor, rows: Tensor) -> Tensor:
        from dpfedexp.trainers.fast.triton_kernels.dropout import dropped

        inner = math.prod(x.shape[2:-1]) if self.channels else 1
        return dropped(x, rows, dropped_below(self.p), kept_share(self.p), CONSTANTS, inner)
