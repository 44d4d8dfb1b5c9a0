"""Between Flower's named arrays and one flat vector, in the layout that the simulator uses."""

from __future__ import annotations

import math
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, ArrayRecord
from numpy.lib.format import header_data_from_array_1_0, write_array_header_1_0
from torch import Tensor

from dpfedexp.core.layout import Layout
from dpfedexp.errors import InputError, require


def layout_of(arrays: ArrayRecord) -> Layout:
    """The layout of a model's arrays. All of them are trained, averaged and covered by the noise, so all must be floating point."""
    require(len(arrays) > 0, "the model's arrays are empty; a model has at least one parameter.")
    for name, array in arrays.items():
        if array.dtype not in ("float16", "float32", "float64"):
            raise InputError(
                f"the model's array {name!r} has type {array.dtype}; only floating-point parameters can be trained. Leave buffers "
                "such as BatchNorm's counters out, and use GroupNorm: running statistics would leave the client without noise."
            )
    return Layout(tuple(arrays), tuple(torch.Size(array.shape) for array in arrays.values()))


def to_flat(arrays: ArrayRecord, layout: Layout, dtype: torch.dtype = torch.float64) -> Tensor:
    """A copy of the arrays as one vector; a sentence if names or shapes are not the layout's."""
    require(
        tuple(arrays) == layout.names,
        f"the arrays are named {list(arrays)}; they must be {list(layout.names)}, in this order.",
    )
    found = [array.numpy() for array in arrays.values()]
    for name, values, shape in zip(layout.names, found, layout.shapes, strict=True):
        require(
            tuple(values.shape) == tuple(shape),
            f"the array {name!r} has shape {tuple(values.shape)}; it must have {tuple(shape)}.",
        )
        require(np.can_cast(values.dtype, np.float64, "same_kind"), f"the array {name!r} does not hold real numbers.")
    flat = torch.empty(layout.dimension, dtype=dtype)
    # Too large for the type is infinite, and found where finite numbers are asked for.
    with np.errstate(over="ignore", invalid="ignore"):
        for values, part in zip(found, flat.split(layout.sizes), strict=True):
            np.copyto(part.numpy(), values.reshape(-1))
    return flat


def as_array(values: np.ndarray) -> Array:
    """Flower's array of these values, in the bytes that Flower writes, without its second copy of them."""
    values, header = np.require(values, requirements="C"), BytesIO()
    write_array_header_1_0(header, header_data_from_array_1_0(values))
    data = b"".join((header.getvalue(), values.reshape(-1).view(np.uint8).data))
    return Array(dtype=str(values.dtype), shape=tuple(values.shape), stype="numpy.ndarray", data=data)


def to_arrays(w: Tensor, layout: Layout) -> ArrayRecord:
    """The vector as named float32 arrays, which is what clients compute with."""
    named = layout.unflatten(w.float())
    return ArrayRecord({name: as_array(value.numpy()) for name, value in named.items()})


def strict_array(array: Array, dtype: str, shape: tuple[int, ...], *, finite: bool = True) -> np.ndarray:
    """The array's values if it is exactly of this type and shape and finite, read without believing anything it says of itself.

    Sizes are compared before a byte is parsed, so an array that claims to be enormous costs nothing. `finite=False` lets NaN and
    infinity through, for a reader that makes zeros of them.
    """
    expected = np.dtype(dtype).newbyteorder("<")
    size = math.prod(shape) * expected.itemsize
    require(array.stype == "numpy.ndarray", "it is not a NumPy array")
    require(array.dtype == dtype, f"its type is not {dtype}")
    require(tuple(array.shape) == shape, f"its shape is not {shape}")
    offset = len(array.data) - size
    require(0 < offset <= 256, "its size is wrong")
    require(array.data[:8] == b"\x93NUMPY\x01\x00", "its header is wrong")
    header = _header(array.data[8:offset])
    require(header == {"descr": expected.str, "fortran_order": False, "shape": shape}, "its header is wrong")
    values = np.frombuffer(array.data, dtype=expected, offset=offset)
    require(not finite or bool(np.isfinite(values).all()), "it is not finite")
    return values.reshape(shape).copy()


def _header(raw: bytes) -> object:
    from ast import literal_eval

    require(len(raw) >= 2 and int.from_bytes(raw[:2], "little") == len(raw) - 2, "its header is wrong")
    try:
        return literal_eval(raw[2:].decode("latin1").strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise InputError("its header is wrong") from None
