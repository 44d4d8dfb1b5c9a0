"""One column of a table as an array: numbers as they are, text and gaps refused with the fix."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.sources.ids import is_missing
from dpfedexp.errors import InputError, nearest, require

_NUMBERS = (int, float, np.number, np.bool_)


def column_names(table: Any) -> list[Hashable]:
    """Of a DataFrame, a Hugging Face data set or a dict of columns."""
    if isinstance(getattr(table, "column_names", None), dict):
        splits = ", ".join(map(repr, table))
        raise InputError(
            f"the data set has the splits {splits}; give one of them, such as dataset[{next(iter(table))!r}]."
        )
    if isinstance(table, Mapping):
        return list(table)
    for attribute in ("column_names", "columns"):
        names = getattr(table, attribute, None)
        if names is not None and not callable(names) and hasattr(table, "__getitem__"):
            require(
                hasattr(table, "__len__"),
                f"the data set is a {type(table).__name__}, which is streamed; load it without streaming=True.",
            )
            return list(names)
    raise InputError(
        f"the table is a {type(table).__name__}; give a DataFrame, a Hugging Face data set or a dict of columns."
    )


def check_column(table: Any, field: str, name: Hashable, verb: str = "names") -> None:
    """Raises `InputError` unless there is exactly one such column."""
    names = column_names(table)
    if name not in names:
        index = getattr(getattr(table, "index", None), "names", ())
        hint = (
            " It is the index: give df.reset_index()." if name in list(index) else nearest(str(name), map(str, names))
        )
        there = "which is not there" if verb == "names" else "which the others have"
        raise InputError(f"{field} {verb} the column {name!r}, {there}.{hint}")
    require(names.count(name) == 1, f"the column {name!r} is there twice; rename one of them.")


def is_category(table: Any, name: Hashable) -> bool:
    """Whether a DataFrame says that a column holds categories: numbers there are names, not amounts."""
    return hasattr(table, "dtypes") and str(getattr(table[name], "dtype", "")) == "category"


def read_column(table: Any, name: Hashable) -> NDArray[Any]:
    """The values as they are stored; text and missing values come in an array of objects."""
    table = table.with_format("numpy") if hasattr(table, "with_format") else table
    values = table[name]
    if isinstance(values, Tensor):
        return values.detach().cpu().numpy()
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif not isinstance(values, np.ndarray | list | tuple):
        # A Hugging Face column is read when it is sliced.
        values = values[:] if hasattr(values, "__getitem__") else list(values)
    if isinstance(values, np.ndarray):
        return values
    kinds = set(map(type, values))
    if kinds <= {int, float, bool}:
        return np.asarray(values)
    # Not np.asarray: it would turn [1, "a"] into text and stack whatever it can.
    objects = np.empty(len(values), dtype=object)
    objects[:] = values if kinds <= {str, type(None), int, float, bool} else [_cell(value) for value in values]
    return objects


def join_columns(name: Hashable, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """One column from those of several clients; a client without rows has no say in its type."""
    full = [part for part in parts if len(part)]
    if not full:
        return parts[0] if parts else np.zeros(0)
    shapes = {part.shape[1:] for part in full}
    require(
        len(shapes) == 1,
        f"column {name!r} has rows of the shapes {sorted(shapes)}; all clients must agree on one shape.",
    )
    mixed = len({part.dtype.kind in "biuf" for part in full}) > 1
    return np.concatenate([part.astype(object) for part in full] if mixed else full)


def settled(name: Hashable, values: NDArray[Any], *, finite: bool, advice: str) -> NDArray[Any]:
    """Numbers or booleans, one or an array per row.

    Args:
        name: the column.
        values: what `read_column` returned.
        finite: whether NaN is refused.
        advice: what to do about text.
    """
    if values.dtype == object and values.ndim == 1:
        refuse_missing(name, values)
        values = _of_objects(name, values, advice)
    kind = values.dtype.kind
    if kind in "Mm":
        raise InputError(
            f"column {name!r} holds dates ({values.dtype}); turn it into numbers, such as days since a public date, "
            "or leave it out."
        )
    require(kind not in "USTO", f"column {name!r} holds text; {advice}")
    require(kind in "biuf", f"column {name!r} has dtype {values.dtype}; it must hold real numbers or booleans.")
    if finite and kind == "f" and values.ndim == 1:
        refuse_missing(name, values)
    return values


def refuse_missing(name: Hashable, values: NDArray[Any], where: str = "") -> None:
    """Raises `InputError` where a row has no value, with the first such row."""
    if values.dtype.kind == "f":
        rows = np.flatnonzero(np.isnan(values))
    elif values.dtype == object:
        rows = np.flatnonzero(np.fromiter(map(is_missing, values), dtype=bool, count=len(values)))
    else:
        return
    if len(rows):
        raise InputError(
            f"column {name!r}{where} has no value in {len(rows)} of {len(values)} rows, first in row {rows[0]}; drop "
            "those rows, or fill them with a public value (a mean of the clients' rows is not public)."
        )


def coded(name: Hashable, values: NDArray[Any], listed: Sequence[Any]) -> NDArray[np.int64]:
    """Places of the values in a public list of categories."""
    require(
        not isinstance(listed, str) and len(listed) > 0 and len(set(listed)) == len(listed),
        f"categories[{name!r}] is {listed!r}; give a list of different values.",
    )
    require(values.ndim == 1, f"column {name!r} holds arrays, which have no categories; take it out of categories.")
    refuse_missing(name, values)
    place = {value: at for at, value in enumerate(listed)}
    found = values.tolist()
    codes = np.fromiter((place.get(value, -1) for value in found), dtype=np.int64, count=len(found))
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        raise InputError(
            f"column {name!r} holds {found[row]!r} in row {row}, which categories[{name!r}] does not list; add it to the list, or "
            "replace it by a listed value such as 'other'."
        )
    return codes


def _of_objects(name: Hashable, values: NDArray[Any], advice: str) -> NDArray[Any]:
    kinds = set(map(type, values))
    if all(issubclass(kind, _NUMBERS) for kind in kinds):
        return np.array(values.tolist())
    if any(issubclass(kind, str | bytes) for kind in kinds):
        raise InputError(f"column {name!r} holds text; {advice}")
    if all(issubclass(kind, np.ndarray | list | tuple) for kind in kinds):
        try:
            return np.stack([np.asarray(value) for value in values]) if len(values) else values
        except ValueError:
            raise InputError(
                f"column {name!r} has rows of different shapes; pad or crop them to one public shape."
            ) from None
    kind = next(kind for kind in kinds if not issubclass(kind, _NUMBERS))
    raise InputError(
        f"column {name!r} holds a {kind.__name__}; it must hold numbers, booleans, or arrays of one shape in every row."
    )


def _cell(value: Any) -> Any:
    """An image or a tensor as an array; anything else as it is."""
    if isinstance(value, Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value) if hasattr(value, "__array_interface__") and not isinstance(value, np.generic) else value
