"""Inputs and targets from tables: DataFrames, Hugging Face data sets, dicts of columns, or one file per client.

No statistics are computed from the rows, because they would reveal something about the clients outside the accounting: lists of
categories are given by the caller, and numbers are not changed.
"""

import csv
import zipfile
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from dpfedexp.data.arrays import as_array
from dpfedexp.data.partition import is_missing
from dpfedexp.errors import InputError, first_line, nearest, require

Names = Hashable | Sequence[Hashable]
_NUMBERS = (int, float, np.number, np.bool_)


@dataclass(frozen=True)
class Columns:
    """The columns of inputs and of targets, and the columns `by` that together make the client id of each row.

    `categories` has the public list of possible values of a column of text; `dtype` is as in `Federation`.
    """

    target: Names
    features: Names | None
    categories: Mapping[Hashable, Sequence[Any]]
    dtype: torch.dtype | None
    by: tuple[Hashable, ...] = ()

    def read(
        self, tables: Iterable[Any], clients: Sequence[Hashable] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], list[int]]:
        """Read tables with the same columns; returns inputs and targets, concatenated, and the number of rows of each table.

        `clients` are the clients' names in messages, by default their numbers.
        """
        columns: dict[Hashable, list[NDArray[Any]]] = {}
        sizes: list[int] = []
        targets: tuple[Hashable, ...] = ()
        features: tuple[Hashable, ...] = ()
        for number, table in enumerate(tables):
            if number == 0:
                targets, features = self._chosen(table)
            client = clients[number] if clients is not None else number
            parts = {name: self._column(table, client, name) for name in (*targets, *features)}
            lengths = {len(part) for part in parts.values()}
            require(len(lengths) == 1, f"the columns have {sorted(lengths)} rows; they must have equally many.")
            sizes.append(lengths.pop())
            for name, part in parts.items():
                columns.setdefault(name, []).append(part)
        require(len(sizes) > 0, "there are no clients; pass at least one.")
        require(sum(sizes) > 0, "all clients are empty; at least one must have a row.")
        joined = {name: _join(name, parts) for name, parts in columns.items()}
        return self._inputs(joined, features), self._targets(joined, targets), sizes

    def _column(self, table: Any, client: Hashable, name: Hashable) -> NDArray[Any]:
        _check_column(table, f"the table of client {client!r}", name, "lacks")
        # Numbers in a categorical column of a DataFrame are names, not amounts.
        category = hasattr(table, "dtypes") and str(getattr(table[name], "dtype", "")) == "category"
        if category and name not in self.categories:
            raise InputError(f"column {name!r} holds categories; {self._advice(name)}")
        values = _read_column(table, name)
        if not self.by and values.ndim == 1:
            _refuse_missing(name, values, f" of client {client!r}")
        return values

    def _chosen(self, table: Any) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
        names, targets = _column_names(table), as_names(self.target)
        for name in targets:
            _check_column(table, "target", name)
        rest = tuple(name for name in names if name not in (*targets, *self.by))
        features = rest if self.features is None else as_names(self.features)
        for name in features:
            _check_column(table, "features", name)
            require(name not in targets, f"column {name!r} is a target and a feature; take it out of features.")
        require(len(targets) > 0, "target is empty; name the column that is to be predicted.")
        require(len(features) > 0, "features is empty; name at least one column that is not the target.")
        for name in self.categories:
            known = (*targets, *features)
            near = nearest(str(name), map(str, known))
            require(name in known, f"categories has {name!r}, which is neither a target nor a feature.{near}")
        return targets, features

    def _inputs(self, columns: Mapping[Hashable, NDArray[Any]], names: tuple[Hashable, ...]) -> NDArray[Any]:
        if len(names) == 1 and names[0] not in self.categories:
            values = self._values(columns, names[0])
            if values.ndim > 1:
                return values
        whole = self.dtype is not None and not self.dtype.is_floating_point
        kind = np.int64 if whole else np.float64 if self.dtype == torch.float64 else np.float32
        blocks: list[NDArray[Any]] = []
        for name in names:
            values = self._values(columns, name)
            if name in self.categories:
                blocks.append((values[:, None] == np.arange(len(self.categories[name]))).astype(kind))
                continue
            _check_flat("features", name, values)
            cut = whole and values.dtype.kind == "f"
            require(not cut, f"column {name!r} holds fractions, and dtype is {self.dtype}; leave one of them out.")
            with np.errstate(over="ignore"):  # values beyond float32 are refused later, with their row
                blocks.append(values.astype(kind)[:, None])
        return np.concatenate(blocks, axis=1)

    def _targets(self, columns: Mapping[Hashable, NDArray[Any]], names: tuple[Hashable, ...]) -> NDArray[Any]:
        values = [self._values(columns, name) for name in names]
        if isinstance(self.target, str) or not isinstance(self.target, Sequence):
            return values[0]
        for name, value in zip(names, values, strict=True):
            _check_flat("target", name, value)
        return np.stack(values, axis=1)

    def _values(self, columns: Mapping[Hashable, NDArray[Any]], name: Hashable) -> NDArray[Any]:
        """The values of a column, one number, boolean or array per row; for a column with categories, indices in their list."""
        values = columns[name]
        if name in self.categories:
            return _codes(name, values, self.categories[name])
        if values.dtype == object and values.ndim == 1:
            _refuse_missing(name, values)
            values = _of_objects(name, values, self._advice(name))
        kind = values.dtype.kind
        require(kind not in "USTO", f"column {name!r} holds text; {self._advice(name)}")
        require(kind in "biuf", f"column {name!r} has dtype {values.dtype}; it must hold real numbers or booleans.")
        if values.ndim == 1:
            _refuse_missing(name, values)
        return values

    def _advice(self, name: Hashable) -> str:
        public = f"give its public list, categories={{{name!r}: [...]}}"
        if name in as_names(self.target):
            return f"{public}: a target becomes its place in the list."
        return f"{public}, or leave the column out with features=[...]."


def _check_flat(field: str, name: Hashable, values: NDArray[Any]) -> None:
    require(values.ndim == 1, f"column {name!r} has rows of shape {values.shape[1:]}; give it alone: {field}={name!r}.")


def client_ids_of(table: Any, by: Names) -> Any:
    """The client id of every row: the value of one column, or a tuple of the values of several."""
    columns = as_names(by)
    require(len(columns) > 0, "by is an empty list; name the column that says which client holds a row.")
    for name in columns:
        _check_column(table, "by", name)
    values = [_read_column(table, name) for name in columns]
    if len(values) == 1:
        return values[0]
    for name, value in zip(columns, values, strict=True):
        _refuse_missing(name, value)
    return list(zip(*(value.tolist() for value in values), strict=True))


def partitions(source: Any, clients: int | None) -> Iterable[Any] | None:
    """The tables of a list or of a partitioner, one per client; None if `source` is one table for all clients."""
    if hasattr(source, "load_partition"):
        count = getattr(source, "num_partitions", clients)
        if count is None:
            raise InputError("the data set does not say how many partitions it has; give their number, clients=100.")
        return (source.load_partition(number) for number in range(count))
    return source if isinstance(source, list | tuple) else None


def as_names(names: Names) -> tuple[Hashable, ...]:
    return tuple(names) if isinstance(names, Sequence) and not isinstance(names, str | bytes) else (names,)


def _column_names(table: Any) -> list[Hashable]:
    found = [getattr(table, attribute, None) for attribute in ("column_names", "columns")]
    names = next((names for names in found if names is not None), list(table) if isinstance(table, Mapping) else None)
    if names is None or callable(names) or isinstance(names, dict) or not hasattr(table, "__len__"):
        kind = type(table).__name__
        known = "a DataFrame, a dict of columns, or one split of a Hugging Face data set that is not streamed"
        raise InputError(f"the table is a {kind}; pass {known}.")
    return list(names)


def _check_column(table: Any, field: str, name: Hashable, verb: str = "names") -> None:
    names = _column_names(table)
    if name not in names:
        there = "which is not there" if verb == "names" else "which the others have"
        raise InputError(f"{field} {verb} the column {name!r}, {there}.{nearest(str(name), map(str, names))}")
    require(names.count(name) == 1, f"the column {name!r} is there twice; rename one of them.")


def _read_column(table: Any, name: Hashable) -> NDArray[Any]:
    """The values of a column as they are stored; text and missing values are in an array of objects."""
    values = (table.with_format("numpy") if hasattr(table, "with_format") else table)[name]
    values = as_array(values)
    if not isinstance(values, np.ndarray | list | tuple):
        # Slicing reads a Hugging Face column.
        values = values[:] if hasattr(values, "__getitem__") else list(values)
    if isinstance(values, np.ndarray):
        return values
    kinds = set(map(type, values))
    if kinds <= {int, float, bool}:
        return np.asarray(values)
    # Not np.asarray: it would turn [1, "a"] into text and stack arrays of equal shape.
    objects = np.empty(len(values), dtype=object)
    objects[:] = values if kinds <= {str, type(None), int, float, bool} else [_cell(value) for value in values]
    return objects


def _cell(value: Any) -> Any:
    """Convert an image or a tensor to an array; return any other value as it is."""
    image = hasattr(value, "__array_interface__") and not isinstance(value, np.generic)
    return as_array(value) if isinstance(value, Tensor) else np.asarray(value) if image else value


def _join(name: Hashable, parts: list[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate a column of several clients, at least one of which has rows; empty clients do not affect its type."""
    full = [part for part in parts if len(part)]
    shapes = {part.shape[1:] for part in full}
    require(len(shapes) == 1, f"column {name!r} has rows of the shapes {sorted(shapes)}; all clients must agree.")
    mixed = len({part.dtype.kind in "biuf" for part in full}) > 1
    return np.concatenate([part.astype(object) for part in full] if mixed else full)


def _refuse_missing(name: Hashable, values: NDArray[Any], where: str = "") -> None:
    if values.dtype.kind not in "fO":
        return
    missing = np.isnan(values) if values.dtype.kind == "f" else [is_missing(value) for value in values]
    rows = np.flatnonzero(missing)
    require(
        len(rows) == 0,
        f"column {name!r}{where} has no value in {len(rows)} of {len(values)} rows, first in row {[*rows, 0][0]}; drop "
        "those rows, or fill them with a public value (a mean of the clients' rows is not public).",
    )


def _codes(name: Hashable, values: NDArray[Any], listed: Sequence[Any]) -> NDArray[np.int64]:
    unique = not isinstance(listed, str) and 0 < len(listed) == len(set(listed))
    require(unique, f"categories[{name!r}] is {listed!r}; give a list of different values.")
    require(values.ndim == 1, f"column {name!r} holds arrays, which have no categories; take it out of categories.")
    _refuse_missing(name, values)
    place = {value: at for at, value in enumerate(listed)}
    found = values.tolist()
    codes = np.fromiter((place.get(value, -1) for value in found), dtype=np.int64, count=len(found))
    if (codes < 0).any():
        row = int((codes < 0).argmax())
        value = f"column {name!r} holds {found[row]!r} in row {row}"
        raise InputError(f"{value}, which categories[{name!r}] does not list; add it to the list, or replace it.")
    return codes


def _of_objects(name: Hashable, values: NDArray[Any], advice: str) -> NDArray[Any]:
    kinds = set(map(type, values))
    if all(issubclass(kind, _NUMBERS) for kind in kinds):
        return np.array(values.tolist())
    require(not any(issubclass(kind, str | bytes) for kind in kinds), f"column {name!r} holds text; {advice}")
    if all(issubclass(kind, np.ndarray | list | tuple) for kind in kinds):
        try:
            return np.stack([np.asarray(value) for value in values])
        except ValueError:
            raise InputError(f"column {name!r} has rows of different shapes; pad or crop them to one.") from None
    kind = next(kind for kind in kinds if not issubclass(kind, _NUMBERS))
    raise InputError(f"column {name!r} holds a {kind.__name__}; it must hold numbers, booleans or arrays of one shape.")


def client_files(path: str | Path, files: str) -> list[Path]:
    """The clients' files, sorted by name; hidden files are skipped."""
    folder = Path(path)
    wrong = f"path is {str(path)!r}, which is no folder"
    require(folder.is_dir(), f"{wrong}; give the folder that holds one file per client.")
    found = sorted(file for file in folder.glob(files) if not file.name.startswith("."))
    require(len(found) > 0, f"path is {str(path)!r}, where no file is called {files!r}; give one per client.")
    for file in found:
        require(
            file.is_file() and file.suffix in _READERS,
            f"{file.name!r} in {str(path)!r} is no file of a client ({', '.join(_READERS)}; pickles may run code); move it away, "
            "or say which are with files='*.csv'.",
        )
    for stem, many in Counter(file.stem for file in found).items():
        require(many == 1, f"the client {stem!r} has several files; give one per client, or choose with files='*.csv'.")
    return found


def read_files(files: list[Path]) -> list[dict[str, Any]]:
    """Read one table per file; a column of text gets the same type in all tables."""
    tables = [_read_file(file) for file in files]
    for name in {name for table in tables for name, values in table.items() if isinstance(values, list)}:
        read, dtype = _kind([value for table in tables for value in table.get(name, ())])
        for table in tables:
            if name in table:
                table[name] = np.array([read(value) for value in table[name]], dtype=dtype)
    return tables


def _read_file(file: Path) -> dict[str, Any]:
    try:
        return _READERS[file.suffix](file)
    except InputError:
        raise
    except (OSError, EOFError, ValueError, KeyError, SafetensorError, zipfile.BadZipFile) as error:
        why = first_line(error)
        raise InputError(f"{file.name!r} can't be read as {file.suffix}: {why}; rewrite it or move it.") from None


def _npz(file: Path) -> dict[str, Any]:
    with np.load(file, allow_pickle=False) as stored:
        return dict(stored)


def _csv(file: Path) -> dict[str, Any]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        require(len(header) > 0, f"{file.name!r} is empty; its first line must name the columns.")
        require(len(set(header)) == len(header), f"{file.name!r} names a column twice; rename one of them.")
        rows = [row for row in reader if row]
    for number, row in enumerate(rows):
        require(len(row) == len(header), f"{file.name!r} has {len(row)} values in row {number}; give one per column.")
    return {name: [row[at].strip() for row in rows] for at, name in enumerate(header)}


_READERS: dict[str, Callable[[Path], dict[str, Any]]] = {".npz": _npz, ".safetensors": load_file, ".csv": _csv}


def _kind(values: list[str]) -> tuple[Callable[[str], Any], Any]:
    """Return the parser and dtype of a column of text: integers, floats or booleans if all values are, else text (gaps: None)."""
    kinds: list[tuple[Callable[[str], Any], Any]] = [
        (int, np.int64),
        (float, np.float64),
        (lambda value: {"true": True, "false": False}[value.lower()], bool),
    ]
    # Python reads 1_2 as 12; in a file it is text.
    if all(values) and not any("_" in value for value in values):
        for read, dtype in kinds:
            with suppress(ValueError, KeyError, OverflowError):
                np.array([read(value) for value in values], dtype=dtype)
                return read, dtype
    return (lambda value: value or None), object
