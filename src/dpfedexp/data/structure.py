"""Inputs of one array, or of several: a tuple or a dict of tensors with the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from dpfedexp.data.arrays import as_tensor
from dpfedexp.errors import InputError, require
from dpfedexp.inputs import leaves

Value = TypeVar("Value")
Numbered = list[tuple[int, Value]]
"""Values with the numbers of their clients."""


def as_inputs(field: str, values: Any) -> Any:
    """A tensor; for a dict, or a tuple of arrays, the same structure of tensors with equally many rows."""
    if isinstance(values, Mapping):
        require(len(values) > 0, f"{field} is an empty dict; it must hold at least one array.")
        inputs: Any = {name: as_tensor(f"{field}[{name!r}]", value) for name, value in values.items()}
    elif is_several(values):
        inputs = tuple(as_tensor(f"{field}[{number}]", value) for number, value in enumerate(values))
    else:
        return as_tensor(field, values)
    lengths = [len(part) for part in leaves(inputs)]
    if len(set(lengths)) > 1:
        what = "dict" if isinstance(inputs, dict) else "tuple"
        raise InputError(
            f"{field} is a {what} of arrays with {', '.join(map(str, lengths))} rows, which means several inputs per example; "
            "give each the same number of rows, or one array or list for a single input."
        )
    return inputs


def is_several(values: Any) -> bool:
    """Whether a value is several inputs per example. A tuple of numbers or lists is one array, written as Python writes it."""
    if isinstance(values, tuple) and not hasattr(values, "_fields"):
        return len(values) > 0 and all(isinstance(part, Tensor | np.ndarray) and part.ndim > 0 for part in values)
    return isinstance(values, Mapping)


def rows(inputs: Any) -> int:
    """How many examples there are."""
    return len(leaves(inputs)[0])


def join(concatenate: Callable[[str, Numbered[Tensor]], Tensor], field: str, pieces: Numbered[Any]) -> Any:
    """One structure from those of several clients, each tensor by `concatenate(field, tensors)`.

    Args:
        concatenate: one tensor from those of numbered clients.
        field: what the inputs are called in messages.
        pieces: (number of the client, its inputs), clients without rows left out.
    """
    start, first = pieces[0]
    for number, piece in pieces:
        alike = type(piece) is type(first) and len(leaves(piece)) == len(leaves(first))
        if not alike or (isinstance(first, dict) and piece.keys() != first.keys()):
            raise InputError(
                f"clients[{number}] {field} is {_shape(piece)}, while that of clients[{start}] is {_shape(first)}; "
                "all clients must agree."
            )
    if isinstance(first, dict):
        return {key: concatenate(f"{field}[{key!r}]", [(at, piece[key]) for at, piece in pieces]) for key in first}
    if isinstance(first, tuple):
        count = range(len(first))
        return tuple(concatenate(f"{field}[{key}]", [(at, piece[key]) for at, piece in pieces]) for key in count)
    return concatenate(field, pieces)


def _shape(inputs: Any) -> str:
    if isinstance(inputs, dict):
        return f"a dict of {', '.join(map(repr, inputs))}"
    return f"a tuple of {len(inputs)} arrays" if isinstance(inputs, tuple) else "one array"
