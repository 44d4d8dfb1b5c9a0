"""How exactly local training computes: float32 throughout by default.

fp32  every product and sum in float32, on a GPU too, where torch would otherwise let convolutions round their factors
tf32  products of a GPU's matrix units round their factors to 10 bits of fraction, a relative error of about 5·10⁻⁴ each; sums are
      float32. A CPU has no such units and computes as fp32
bf16  values, gradients and products in bfloat16 (7 bits of fraction, 4·10⁻³), sums in float32; the parameters that the steps move,
      and everything from clipping on, stay float32 or better, so that no privacy statement depends on it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor

from dpfedexp.errors import InputError

Precision = Literal["fp32", "tf32", "bf16"]


def check_precision(precision: str) -> None:
    if precision not in get_args(Precision):
        raise InputError(f"precision is {precision!r}; it must be 'fp32', 'tf32' or 'bf16'.")


def low(x: Tensor, precision: Precision) -> Tensor:
    """Inputs as the network computes with them; integers are tokens and stay."""
    return x.bfloat16() if precision == "bf16" and x.is_floating_point() else x


@contextmanager
def arithmetic(precision: Precision, device: torch.device, *, same: bool = False) -> Iterator[None]:
    """torch's global switches for the length of a local update. With `same` a kernel gives the same bits every time."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic)
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    cudnn.deterministic = same or cudnn.deterministic
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
