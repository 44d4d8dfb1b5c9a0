"""One tensor from many pieces: per-client arrays, or the items of a torch `Dataset`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from dpfedexp.data.arrays import as_tensor
from dpfedexp.errors import InputError, require


def concatenate_clients(clients: Iterable[tuple[Any, Any]]) -> tuple[Tensor, Tensor, list[int]]:
    """All the rows in order of client, and how many each client holds."""
    inputs: list[Tensor] = []
    targets: list[Tensor] = []
    for number, pair in enumerate(clients):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(f"clients[{number}] is a {type(pair).__name__}; it must be a pair (inputs, targets).")
        x, y = as_tensor(f"clients[{number}] inputs", pair[0]), as_tensor(f"clients[{number}] targets", pair[1])
        require(
            len(x) == len(y),
            f"clients[{number}] has {len(x)} inputs and {len(y)} targets; there must be one target per row.",
        )
        inputs.append(x)
        targets.append(y)
    require(len(inputs) > 0, "clients is empty; there must be at least one client.")
    sizes = [len(x) for x in inputs]
    require(sum(sizes) > 0, "clients hold no data at all; at least one of them must have a row.")
    return _concatenate("inputs", inputs), _concatenate("targets", targets), sizes


def stack_dataset(dataset: Any) -> tuple[Tensor, Tensor]:
    """The items of a map-style data set of (input, target) pairs, read once."""
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) != 2:
            raise InputError(f"dataset has {len(dataset.tensors)} tensors; it must have two, inputs and targets.")
        return dataset.tensors[0], dataset.tensors[1]
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(f"dataset is a {type(dataset).__name__}; it must have a length and items (input, target).")
    length = len(dataset)
    require(length > 0, "dataset is empty; it must have at least one item.")
    stacked: list[Tensor] = []
    for number in range(length):
        item = dataset[number]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(f"dataset[{number}] is a {type(item).__name__}; it must be a pair (input, target).")
        for part, (name, value) in enumerate(zip(("input", "target"), item, strict=True)):
            tensor = _item(f"dataset[{number}] {name}", value)
            if number == 0:
                stacked.append(torch.empty((length, *tensor.shape), dtype=tensor.dtype))
            expected = stacked[part]
            if tensor.shape != expected.shape[1:] or tensor.dtype != expected.dtype:
                raise InputError(
                    f"dataset[{number}] {name} is {_kind(tensor)}, while the first item's is {_kind(expected[0])}; "
                    "all items must agree."
                )
            expected[number] = tensor
    return stacked[0], stacked[1]


def _item(field: str, value: Any) -> Tensor:
    if isinstance(value, Tensor | np.ndarray | int | float | np.generic | list | tuple):
        return as_tensor(field, value[None] if isinstance(value, Tensor) else np.asarray(value)[None])[0]
    raise InputError(
        f"{field} is a {type(value).__name__}; it must be a tensor, an array or a number. "
        "Give the data set a transform that makes tensors."
    )


def _concatenate(field: str, parts: list[Tensor]) -> Tensor:
    """Joined along rows; the empty parts, whose shape says nothing, are left out."""
    full = [(number, part) for number, part in enumerate(parts) if len(part)]
    first_number, first = full[0]
    for number, part in full:
        if part.shape[1:] != first.shape[1:] or _family(part) != _family(first):
            raise InputError(
                f"clients[{number}] {field} is {_kind(part[0])} per row, "
                f"while that of clients[{first_number}] is {_kind(first[0])}; all clients must agree."
            )
    return torch.cat([part for _, part in full])


def _family(tensor: Tensor) -> str:
    """Types that may be mixed; bytes are pixels and would be scaled, so they never mix with other integers."""
    if tensor.is_floating_point():
        return "float"
    return str(tensor.dtype) if tensor.dtype in (torch.uint8, torch.bool) else "integer"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
