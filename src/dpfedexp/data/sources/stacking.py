"""One tensor from many pieces: per-client arrays, or the items of a torch `Dataset`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from dpfedexp.data import structure
from dpfedexp.data.arrays import as_tensor
from dpfedexp.errors import InputError, require


def concatenate_clients(clients: Iterable[tuple[Any, Any]]) -> tuple[Any, Tensor, list[int]]:
    """All the rows in order of client, and how many each client holds."""
    inputs: structure.Numbered[Any] = []
    targets: structure.Numbered[Tensor] = []
    sizes: list[int] = []
    for number, pair in enumerate(clients):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"clients[{number}] is a {type(pair).__name__}; it must be a pair (inputs, targets), a torch Dataset or a "
                "DataLoader (Federation.from_loaders takes lists of rows, Federation.from_datasets tables)."
            )
        x = structure.as_inputs(f"clients[{number}] inputs", pair[0])
        y = as_tensor(f"clients[{number}] targets", pair[1])
        sizes.append(len(y))
        require(
            structure.rows(x) == len(y),
            f"clients[{number}] has {structure.rows(x)} inputs and {len(y)} targets; there must be one target per row.",
        )
        # The shape and the type of an empty array say nothing.
        if len(y):
            inputs.append((number, x))
            targets.append((number, y))
    require(len(sizes) > 0, "clients is empty; there must be at least one client.")
    require(sum(sizes) > 0, "clients hold no data at all; at least one of them must have a row.")
    return structure.join(_concatenate, "inputs", inputs), _concatenate("targets", targets), sizes


def stack_dataset(dataset: Any, field: str = "dataset") -> tuple[Tensor, Tensor]:
    """The items of a map-style data set of (input, target) pairs, read once.

    Args:
        dataset: what has a length and items.
        field: what it is called in messages.
    """
    tensors, indices = _tensors(dataset)
    if tensors is not None:
        if len(tensors) != 2:
            raise InputError(f"{field} has {len(tensors)} tensors; it must have two, inputs and targets.")
        return (tensors[0], tensors[1]) if indices is None else (tensors[0][indices], tensors[1][indices])
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise InputError(f"{field} is a {type(dataset).__name__}; it must have a length and items (input, target).")
    length = len(dataset)
    require(length > 0, f"{field} is empty; it must have at least one item.")
    stacked: list[Tensor] = []
    for number in range(length):
        item = dataset[number]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InputError(f"{field}[{number}] is {wrong_item(item)}")
        for part, (name, value) in enumerate(zip(("input", "target"), item, strict=True)):
            tensor = _item(f"{field}[{number}] {name}", value)
            if number == 0:
                stacked.append(torch.empty((length, *tensor.shape), dtype=tensor.dtype))
            expected = stacked[part]
            if tensor.shape != expected.shape[1:] or tensor.dtype != expected.dtype:
                raise InputError(
                    f"{field}[{number}] {name} is {_kind(tensor)}, while the first item's is {_kind(expected[0])}; "
                    "all items must agree."
                )
            expected[number] = tensor
    return stacked[0], stacked[1]


def _tensors(dataset: Any) -> tuple[tuple[Tensor, ...] | None, Tensor | None]:
    """The tensors of a `TensorDataset`, and which of their rows a `Subset` takes: read at once, not item by item."""
    indices: Tensor | None = None
    # A class with items of its own, such as augmented ones, is read by them.
    while isinstance(dataset, Subset) and type(dataset).__getitem__ is Subset.__getitem__:
        inner = torch.as_tensor(np.asarray(dataset.indices, dtype=np.int64))
        indices = inner if indices is None else inner[indices]
        dataset = dataset.dataset
    plain = isinstance(dataset, TensorDataset) and type(dataset).__getitem__ is TensorDataset.__getitem__
    return (dataset.tensors, indices) if plain else (None, None)


def wrong_item(item: Any) -> str:
    if isinstance(item, dict):
        keys = ", ".join(map(repr, item))
        return (
            f"a dict with {keys}; it must be a pair (input, target): make pairs of it in the data set or its collate_fn, "
            "or give tables with named columns to Federation.from_datasets."
        )
    return f"a {type(item).__name__}; it must be a pair (input, target)."


def _item(field: str, value: Any) -> Tensor:
    if isinstance(value, Tensor | np.ndarray | int | float | np.generic | list | tuple):
        return as_tensor(field, value[None] if isinstance(value, Tensor) else np.asarray(value)[None])[0]
    raise InputError(
        f"{field} is a {type(value).__name__}; it must be a tensor, an array or a number. "
        "Give the data set a transform that makes tensors."
    )


def _concatenate(field: str, pieces: structure.Numbered[Tensor]) -> Tensor:
    """The rows of all the clients that hold some, in order."""
    start, first = pieces[0]
    for number, piece in pieces:
        if piece.shape[1:] != first.shape[1:] or _family(piece) != _family(first):
            raise InputError(
                f"clients[{number}] {field} is {_kind(piece[0])} per row, "
                f"while that of clients[{start}] is {_kind(first[0])}; all clients must agree."
            )
    return torch.cat([piece for _, piece in pieces])


def _family(tensor: Tensor) -> str:
    """Types that may be mixed; bytes are pixels and would be scaled, so they never mix with other integers."""
    if tensor.is_floating_point():
        return "float"
    return str(tensor.dtype) if tensor.dtype in (torch.uint8, torch.bool) else "integer"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
