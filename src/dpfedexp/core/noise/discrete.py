"""The exact discrete Gaussian (Canonne, Kamath, Steinke 2020), sampled by OpenDP with rational arithmetic and system entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from dpfedexp.errors import InputError


@lru_cache(maxsize=64)
def _mechanism(scale: float) -> Callable[[list[int]], list[int]]:
    try:
        import opendp.prelude as dp
    except ModuleNotFoundError:
        raise InputError("strict noise needs OpenDP; install it with: pip install 'dpfedexp[secure]'.") from None
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    return dp.m.make_gaussian(*space, scale)


def discrete_gaussian(shape: Sequence[int], scale: float) -> Tensor:
    """Independent whole numbers k with probability proportional to exp(−k²/(2·scale²)), as float64."""
    drawn = _mechanism(scale)([0] * math.prod(shape))
    return torch.tensor(drawn, dtype=torch.float64).reshape(tuple(shape))
