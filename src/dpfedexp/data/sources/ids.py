"""Clients by their own ids: strings, gappy numbers, anything that can be hashed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.assignment import as_assignment
from dpfedexp.data.partition import Assignment
from dpfedexp.errors import InputError, require


def by_ids(
    field: str, ids: Any, examples: int, clients: int | None = None
) -> tuple[Assignment, tuple[Hashable | None, ...]]:
    """Who holds which rows from one id per row, and the ids in order of client.

    Clients are numbered in the order of their sorted ids (of first appearance, where ids can't be sorted), so that the order of the
    rows does not decide. Time is that of one sort, whatever the number of clients.

    Args:
        field: what the ids are called in messages.
        ids: one per row.
        examples: the number of rows.
        clients: how many clients there are; those beyond the ids hold no rows, and their name is None.
    """
    codes, names = _numbered(field, ids)
    require(
        len(codes) == examples,
        f"{field} has {len(codes)} ids and there are {examples} rows; give one client id per row.",
    )
    require(
        clients is None or (isinstance(clients, int) and clients >= len(names)),
        f"clients is {clients!r}, but {field} holds {len(names)} different ids; it must be a whole number of at least that.",
    )
    split = as_assignment(codes, examples, clients)
    return split, (*names, *[None] * (len(split.offsets) - 1 - len(names)))


def is_text(values: Any) -> bool:
    """Whether an array or list holds strings, which can only be ids."""
    if isinstance(values, np.ndarray) or hasattr(values, "to_numpy"):
        array = values if isinstance(values, np.ndarray) else values.to_numpy()
        if array.dtype.kind in "UST":
            return True
        return bool(array.dtype == object and array.ndim == 1 and len(array) and isinstance(array[0], str))
    return isinstance(values, list | tuple) and len(values) > 0 and isinstance(values[0], str)


def is_missing(value: Any) -> bool:
    """None, NaN, and what pandas writes for a value that is not there."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating | np.datetime64 | np.timedelta64) and bool(value != value)


def _numbered(field: str, ids: Any) -> tuple[NDArray[np.int64], list[Hashable]]:
    values = _flat(field, ids)
    if isinstance(values, np.ndarray) and values.dtype.kind in "iub":
        unique, codes = np.unique(values, return_inverse=True)
        return codes.astype(np.int64, copy=False), unique.tolist()
    listed = list(values) if not isinstance(values, np.ndarray) or values.dtype.kind in "Mm" else values.tolist()
    if any(issubclass(kind, Tensor) for kind in set(map(type, listed))):
        # A tensor is hashed by where it lies in memory, so that every row would be a client of its own.
        listed = [value.item() if isinstance(value, Tensor) else value for value in listed]
    numbers: defaultdict[Hashable, int] = defaultdict()
    numbers.default_factory = numbers.__len__  # in order of first appearance; one look at each row, in C
    try:
        codes = np.fromiter(map(numbers.__getitem__, listed), dtype=np.int64, count=len(listed))
    except TypeError as error:
        raise InputError(f"{field} holds an id that is no key ({error}); give strings, numbers or tuples.") from None
    if any(map(is_missing, numbers)):
        row = next(row for row, value in enumerate(listed) if is_missing(value))
        raise InputError(f"{field} has no id in row {row}; drop the rows without one, or say whose they are.")
    try:
        names: list[Hashable] = sorted(numbers)  # type: ignore[type-var]
    except TypeError:
        return codes, list(numbers)
    place = np.empty(len(names), dtype=np.int64)
    place[[numbers[name] for name in names]] = np.arange(len(names))
    return place[codes], names


def _flat(field: str, ids: Any) -> Any:
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu().numpy()
    elif hasattr(ids, "to_numpy"):
        ids = ids.to_numpy()
    if isinstance(ids, np.ndarray):
        require(ids.ndim == 1, f"{field} has shape {ids.shape}; give one id per row, such as {field}[:, 0] or tuples.")
        return ids
    if not isinstance(ids, Iterable) or isinstance(ids, str | bytes | Mapping):
        raise InputError(f"{field} is a {type(ids).__name__}; give one client id per row, as a list or an array.")
    return list(ids)
