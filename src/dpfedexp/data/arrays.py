"""From what users hold to tensors: checked once, kept in their compact type, cast where they are used.

Inputs are one array, or several: a tuple or a dict of arrays with the same rows.
"""

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.errors import InputError, checked, is_count, require
from dpfedexp.inputs import leaves

Transform = Callable[[Tensor], Tensor]

_CHECK_ELEMENTS = 1 << 22
"""Elements looked at together when searching for NaN, so that the search needs no memory in proportion to the data."""
_HELD = {np.dtype(kind) for kind in ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}


def as_tensor(field: str, values: Any) -> Tensor:
    """A CPU tensor over the same memory where possible; text, objects and complex numbers are refused."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) or tensor.is_complex():
            return as_tensor(field, tensor.numpy())
    else:
        try:
            array = np.asarray(values)
        except ValueError:
            raise InputError(f"{field} is ragged; give one array whose rows have the same shape.") from None
        if array.dtype not in _HELD:
            array = _widen(field, array)
        with warnings.catch_warnings():
            # A read-only array (a memory map) is shared like any other: nothing here writes to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array)
    require(tensor.dim() >= 1, f"{field} is a single number; it must have one row per example.")
    return tensor


def as_array(values: Any) -> Any:
    """The array of a tensor, or of what has `to_numpy`; anything else as it is."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def _widen(field: str, array: NDArray[Any]) -> NDArray[Any]:
    """Wide unsigned, extended and byte-swapped numbers in a type that torch computes with."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    require(kind in "uif", f"{field} has dtype {array.dtype}; it must hold real numbers or booleans.")
    if kind == "u" and size == 8:
        fits = array.size == 0 or int(array.max()) < 1 << 63
        require(fits, f"{field} holds values of 2^63 or more; they must fit in 64-bit signed integers.")
    if kind == "u":
        return array.astype(np.int32 if size == 2 else np.int64)
    return array.astype(np.float64 if size > 8 else array.dtype.newbyteorder("="))


def as_inputs(field: str, values: Any) -> Any:
    """A tensor; for a dict, or a tuple of arrays, the same structure of tensors with equally many rows."""
    if isinstance(values, Mapping):
        require(len(values) > 0, f"{field} is an empty dict; it must hold at least one array.")
        inputs: Any = {name: as_tensor(f"{field}[{name!r}]", value) for name, value in values.items()}
    elif (
        # A tuple of numbers or lists is one array, written as Python writes it.
        isinstance(values, tuple)
        and not hasattr(values, "_fields")
        and len(values) > 0
        and all(isinstance(part, Tensor | np.ndarray) and part.ndim > 0 for part in values)
    ):
        inputs = tuple(as_tensor(f"{field}[{number}]", value) for number, value in enumerate(values))
    else:
        return as_tensor(field, values)
    lengths = [len(part) for part in leaves(inputs)]
    require(
        len(set(lengths)) == 1,
        f"{field} is a {'dict' if isinstance(inputs, dict) else 'tuple'} of arrays with {', '.join(map(str, lengths))} rows, "
        "which means several inputs per example; give each the same number of rows, or one array or list for a single input.",
    )
    return inputs


def rows(inputs: Any) -> int:
    """How many examples there are."""
    return len(leaves(inputs)[0])


def check_finite(field: str, tensor: Tensor) -> None:
    """Refuse NaN and infinities, saying how many rows hold one and which is the first."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return
    parts = tensor.split(max(1, _CHECK_ELEMENTS // math.prod(tensor.shape[1:])))
    bad = torch.cat([~torch.isfinite(part).reshape(len(part), -1).all(1) for part in parts]).nonzero()
    require(
        len(bad) == 0,
        f"{field} is not finite (NaN, infinite, or beyond {str(tensor.dtype).removeprefix('torch.')}) in {len(bad)} of "
        f"{len(tensor)} rows, first in row {int(bad.min()) if len(bad) else -1}; remove or repair them.",
    )


@checked
def cast_inputs(inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """What a model eats: bytes become x/255 in float, floats become float32, other integers (tokens) become int64.

    `dtype` asks for another floating type, or for integers where bytes are tokens rather than pixels.
    """
    if dtype is not None and not dtype.is_floating_point:
        return inputs.to(dtype)
    if inputs.dtype == torch.uint8:
        return inputs.to(dtype or torch.float32).div_(255)
    if inputs.is_floating_point() or inputs.dtype == torch.bool:
        return inputs.to(dtype or torch.float32)
    return inputs.to(torch.int64)


@checked
def cast_targets(targets: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Class labels become int64, real targets float32 (or `dtype`, where that is a floating type)."""
    if not targets.is_floating_point():
        return targets.to(torch.int64)
    return targets.to(dtype if dtype is not None and dtype.is_floating_point else torch.float32)


def check_count(field: str, value: Any) -> int:
    require(is_count(value), f"{field} is {value!r}; it must be a whole number of at least 1.")
    return int(value)


def check_seed(seed: Any) -> int:
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    require(whole and 0 <= seed < 1 << 64, f"seed is {seed!r}; it must be a whole number from 0 to 2^64 - 1.")
    return int(seed)
