"""Conversion of arrays, data sets and loaders to tensors, with checks.

Inputs are one array, or several: a tuple or a dict of arrays with the same number of rows.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import data

from dpfedexp.core.modules import leaves
from dpfedexp.errors import InputError, checked, is_count, require

Transform = Callable[[Tensor], Tensor]

_CHECK_ELEMENTS = 1 << 22
"""How many elements are checked for NaN at a time, so that memory does not grow with the data."""
_HELD = {np.dtype(kind) for kind in ("?", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")}


def as_tensor(field: str, values: Any) -> Tensor:
    """Return a CPU tensor, which shares the values' memory where possible; refuses text, objects and complex numbers."""
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64) or tensor.is_complex():
            return as_tensor(field, tensor.numpy())
    else:
        try:
            array = np.asarray(values)
        except ValueError:
            raise InputError(f"{field} is ragged; pass one array whose rows have the same shape.") from None
        if array.dtype not in _HELD:
            array = _widen(field, array)
        with warnings.catch_warnings():
            # A read-only array (a memory map) can be shared: this library does not write to it.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
            tensor = torch.from_numpy(np.ascontiguousarray(array) if array.ndim else array)
    require(tensor.dim() >= 1, f"{field} is a single number; it must have one row per example.")
    return tensor


def as_array(values: Any) -> Any:
    """Return a NumPy array for a tensor or a value with `to_numpy`; any other value as it is."""
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    return values.to_numpy() if hasattr(values, "to_numpy") else values


def _widen(field: str, array: NDArray[Any]) -> NDArray[Any]:
    kind = array.dtype.kind
    number = "number the classes by a public list: [CLASSES.index(name) for name in names]"
    table = "Federation.from_pandas(df, …, categories={…}).inputs turns text into numbers"
    names = f"; {number if 'targets' in field else table}" if kind in "USTO" else ""
    require(kind in "uif", f"{field} has dtype {array.dtype}; it must hold real numbers or booleans{names}.")
    if kind == "u":
        fits = array.size == 0 or int(array.max()) < 1 << 63
        require(fits, f"{field} holds values of 2^63 or more; they must fit in 64-bit signed integers.")
        return array.astype(np.int64)
    return array.astype(np.float64 if array.dtype.itemsize > 8 else array.dtype.newbyteorder("="))


def as_inputs(field: str, values: Any) -> Any:
    """Return a tensor, or for a dict or a tuple of arrays the same structure of tensors with equally many rows."""
    if isinstance(values, Mapping):
        require(len(values) > 0, f"{field} is an empty dict; it must hold at least one array.")
        inputs: Any = {name: as_tensor(f"{field}[{name!r}]", value) for name, value in values.items()}
    elif (
        # A tuple of numbers or lists is one array in Python's notation.
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
    return len(leaves(inputs)[0])


def check_finite(field: str, tensor: Tensor) -> None:
    """Raise `InputError` for NaN and infinities; the message says how many rows have one and which is the first."""
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
    """Cast inputs for a model: bytes become x/255 in float, floats become float32, other integers (tokens) become int64.

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
    """Cast targets for a loss: class labels become int64, real targets float32 (or `dtype`, if that is a floating type)."""
    if not targets.is_floating_point():
        return targets.to(torch.int64)
    return targets.to(dtype if dtype is not None and dtype.is_floating_point else torch.float32)


def check_count(field: str, value: Any) -> int:
    require(is_count(value), f"{field} is {value!r}; it must be a whole number of at least 1.")
    return int(value)


def read_rows(field: str, client: Any) -> tuple[Any, Any]:
    """Read a client's inputs and targets: every row once, in the order of the data set; empty lists for a client without rows."""
    if isinstance(client, data.DataLoader):
        return _of_loader(field, client)
    if isinstance(client, data.IterableDataset) or not hasattr(client, "__getitem__") or not hasattr(client, "__len__"):
        client = list(client)
    return _stacked(client, field) if len(client) else ([], [])


def _of_loader(field: str, loader: data.DataLoader[Any]) -> tuple[Any, Any]:
    """Read the data set of a loader, in its order: shuffled rows would make a different federation each time."""
    rows, sampler = loader.dataset, loader.sampler
    require(not loader.drop_last, f"{field} is a DataLoader with drop_last=True, which loses rows; give its dataset.")
    require(
        loader.collate_fn in (data.default_collate, data.default_convert),
        f"{field} is a DataLoader with a custom collate_fn; give a data set whose items are pairs (input, target) of one shape.",
    )
    # Only these samplers visit every row once, so that the order of the data set can be restored.
    whole = type(sampler) is data.SequentialSampler or (
        type(sampler) is data.RandomSampler and not sampler.replacement and sampler.num_samples == len(rows)  # type: ignore[arg-type]
    )
    require(
        isinstance(rows, data.IterableDataset)
        or (whole and (loader.batch_size is not None or loader.batch_sampler is None)),
        f"{field} is a DataLoader with a custom sampler; pass the client's rows, such as torch.utils.data.Subset(dataset, rows).",
    )
    return read_rows(field, rows)


def concatenate_clients(clients: Iterable[Any]) -> tuple[Any, Tensor, list[int]]:
    """Return inputs and targets of all clients, concatenated in the order of clients, and the number of rows of each client.

    A client is a pair (inputs, targets), or a loader, a data set or an iterator of rows.
    """
    # A single loader or data set would turn every batch or row into a client.
    for kind in (data.DataLoader, data.Dataset):
        one = f"clients is a single {kind.__name__}"
        require(not isinstance(clients, kind), f"{one}; pass a list with one per client, or split its rows (iid).")
    table = type(clients).__name__
    require(
        not table.startswith("DataFrame"),
        f"clients is a {table}; write Federation.from_pandas(df, by='user', target='y') with its columns.",
    )
    inputs: list[tuple[int, Any]] = []
    targets: list[tuple[int, Tensor]] = []
    sizes: list[int] = []
    for number, client in enumerate(clients):
        holds_rows = isinstance(client, data.DataLoader | data.Dataset | Iterator)
        pair = read_rows(f"clients[{number}]", client) if holds_rows else client
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise InputError(
                f"clients[{number}] is a {type(pair).__name__}; it must be a pair (inputs, targets), a torch Dataset, a "
                "DataLoader or an iterator of rows, such as iter(rows) (Federation.from_datasets takes tables)."
            )
        x = as_inputs(f"clients[{number}] inputs", pair[0])
        y = as_tensor(f"clients[{number}] targets", pair[1])
        sizes.append(len(y))
        require(rows(x) == len(y), f"clients[{number}] has {rows(x)} inputs and {len(y)} targets; give one per row.")
        # The shape and the type of an empty array are not used.
        if len(y):
            inputs.append((number, x))
            targets.append((number, y))
    require(len(sizes) > 0, "clients is empty; there must be at least one client.")
    require(sum(sizes) > 0, "all clients are empty; at least one must have a row.")
    return _join(inputs), _concatenate("targets", targets), sizes


def _stacked(dataset: Any, field: str) -> tuple[Tensor, Tensor]:
    """Stack the items of a map-style data set of (input, target) pairs, each read once; `field` is its name in messages."""
    tensors = _tensors(dataset)
    if tensors is not None:
        require(len(tensors) == 2, f"{field} has {len(tensors)} tensors; it must have two, inputs and targets.")
        return tensors[0], tensors[1]
    stacked: list[Tensor] = []
    for number in range(len(dataset)):
        item = dataset[number]
        if not isinstance(item, tuple | list) or len(item) != 2:
            what, remedy = f"a {type(item).__name__}", ""
            if isinstance(item, dict):
                what = f"a dict with {', '.join(map(repr, item))}"
                remedy = (
                    ": make pairs of it in the data set, or give tables with named columns to Federation.from_datasets"
                )
            raise InputError(f"{field}[{number}] is {what}; it must be a pair (input, target){remedy}.")
        for part, (name, value) in enumerate(zip(("input", "target"), item, strict=True)):
            if not isinstance(value, Tensor | np.ndarray | int | float | np.generic | list | tuple):
                what = f"{field}[{number}] {name} is a {type(value).__name__}"
                raise InputError(f"{what}; it must be a tensor, an array or a number, which a transform can make.")
            row = value[None] if isinstance(value, Tensor) else np.asarray(value)[None]
            tensor = as_tensor(f"{field}[{number}] {name}", row)[0]
            if number == 0:
                stacked.append(torch.empty((len(dataset), *tensor.shape), dtype=tensor.dtype))
            expected = stacked[part]
            if tensor.shape != expected.shape[1:] or tensor.dtype != expected.dtype:
                kinds = f"{_kind(tensor)}, while the first item's is {_kind(expected[0])}"
                raise InputError(f"{field}[{number}] {name} is {kinds}; all items must agree.")
            expected[number] = tensor
    return stacked[0], stacked[1]


def _tensors(dataset: Any) -> tuple[Tensor, ...] | None:
    """The tensors of a `TensorDataset`, or the rows of them that a `Subset` selects; None for other data sets."""
    indices: Tensor | None = None
    # A subclass with its own __getitem__, such as for augmentation, is read item by item.
    while isinstance(dataset, data.Subset) and type(dataset).__getitem__ is data.Subset.__getitem__:
        inner = torch.as_tensor(np.asarray(dataset.indices, dtype=np.int64))
        indices = inner if indices is None else inner[indices]
        dataset = dataset.dataset
    if not isinstance(dataset, data.TensorDataset) or type(dataset).__getitem__ is not data.TensorDataset.__getitem__:
        return None
    return dataset.tensors if indices is None else tuple(tensor[indices] for tensor in dataset.tensors)


def _join(pieces: list[tuple[int, Any]]) -> Any:
    """Concatenate the inputs of all clients with rows, in order; all must have the same structure."""
    start, first = pieces[0]
    for number, piece in pieces:
        found, expected = _structure(piece), _structure(first)
        there = f"clients[{number}] inputs is {found}, while that of clients[{start}] is {expected}"
        require(found == expected, f"{there}; all clients must agree.")
    if isinstance(first, Tensor):
        return _concatenate("inputs", pieces)
    keys = list(first) if isinstance(first, dict) else range(len(first))
    joined = {key: _concatenate(f"inputs[{key!r}]", [(at, piece[key]) for at, piece in pieces]) for key in keys}
    return joined if isinstance(first, dict) else tuple(joined.values())


def _structure(inputs: Any) -> str:
    if isinstance(inputs, dict):
        return f"a dict of {', '.join(sorted(map(repr, inputs)))}"
    return f"a tuple of {len(inputs)} arrays" if isinstance(inputs, tuple) else "one array"


def _concatenate(field: str, pieces: list[tuple[int, Tensor]]) -> Tensor:
    """Concatenate the rows of all clients with rows, in order; all must have the same shape and family of types."""
    start, first = pieces[0]
    for number, piece in pieces:
        if piece.shape[1:] != first.shape[1:] or _family(piece) != _family(first):
            kinds = f"{_kind(piece[0])} per row, while that of clients[{start}] is {_kind(first[0])}"
            raise InputError(f"clients[{number}] {field} is {kinds}; all clients must agree.")
    return torch.cat([piece for _, piece in pieces])


def _family(tensor: Tensor) -> str:
    """The family of types that may be mixed; bytes are pixels, which are scaled, so they never mix with other integers."""
    if tensor.is_floating_point():
        return "float"
    return str(tensor.dtype) if tensor.dtype in (torch.uint8, torch.bool) else "integer"


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"
