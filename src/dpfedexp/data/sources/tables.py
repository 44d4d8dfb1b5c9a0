"""Inputs and targets from tables with named columns: DataFrames, Hugging Face data sets, dicts of columns.

Nothing is learned from the rows. Categories, means and scales that are computed from the clients' rows would tell about them
outside the accounting, so lists of categories are given, and numbers stay as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfedexp.data.sources.columns import (
    check_column,
    coded,
    column_names,
    is_category,
    join_columns,
    read_column,
    refuse_missing,
    settled,
)
from dpfedexp.errors import InputError, nearest, require

Names = Hashable | Sequence[Hashable]


@dataclass(frozen=True)
class Columns:
    """Which columns are inputs and which are targets.

    Attributes:
        target: a column, or a list of them.
        features: a column, a list of them, or None for all that are left.
        categories: for columns of text, the public list of what may be in them.
        dtype: as in `Federation`.
        finite: whether NaN is refused.
        by: the columns that say who holds a row; they are no features unless they are named as such.
    """

    target: Names
    features: Names | None
    categories: Mapping[Hashable, Sequence[Any]] | None
    dtype: torch.dtype | None
    finite: bool
    by: tuple[Hashable, ...] = ()

    def of(
        self, tables: Iterable[Any], clients: Sequence[Hashable] | None = None
    ) -> tuple[NDArray[Any], NDArray[Any], list[int]]:
        """Inputs and targets of several tables with the same columns, one under the other, and how long each is.

        Args:
            tables: one, or one per client.
            clients: what the clients are called in messages; their numbers by default.
        """
        columns: dict[Hashable, list[NDArray[Any]]] = {}
        sizes: list[int] = []
        targets: tuple[Hashable, ...] = ()
        features: tuple[Hashable, ...] = ()
        for number, table in enumerate(tables):
            if number == 0:
                targets, features = self._chosen(table)
            client = clients[number] if clients is not None else number
            parts = {name: self._read(table, client, name) for name in (*targets, *features)}
            lengths = {len(part) for part in parts.values()}
            require(
                len(lengths) == 1,
                f"the columns have {' and '.join(map(str, sorted(lengths)))} rows; they must have equally many.",
            )
            sizes.append(lengths.pop())
            for name, part in parts.items():
                columns.setdefault(name, []).append(part)
        require(len(sizes) > 0, "there is no client at all; a federation needs at least one.")
        require(sum(sizes) > 0, "the clients hold no rows at all; at least one of them must have a row.")
        joined = {name: join_columns(name, parts) for name, parts in columns.items()}
        return self._inputs(joined, features), self._targets(joined, targets), sizes

    def _read(self, table: Any, client: Hashable, name: Hashable) -> NDArray[Any]:
        check_column(table, f"the table of client {client!r}", name, "lacks")
        if name not in (self.categories or {}) and is_category(table, name):
            raise InputError(f"column {name!r} holds categories; {self._advice(name)}")
        values = read_column(table, name)
        if not self.by and values.ndim == 1 and (self.finite or values.dtype == object):
            refuse_missing(name, values, f" of client {client!r}")
        return values

    def _chosen(self, table: Any) -> tuple[tuple[Hashable, ...], tuple[Hashable, ...]]:
        names = column_names(table)
        targets = listed(self.target)
        for name in targets:
            check_column(table, "target", name)
        if self.features is None:
            features = tuple(name for name in names if name not in (*targets, *self.by))
        else:
            features = listed(self.features)
        for name in features:
            check_column(table, "features", name)
            require(name not in targets, f"column {name!r} is a target and a feature; take it out of features.")
        require(len(targets) > 0, "target is empty; name the column that is to be predicted.")
        require(len(features) > 0, "features is empty; name at least one column that is not the target.")
        for name in self.categories or ():
            if name not in (*targets, *features):
                known = nearest(str(name), map(str, (*targets, *features)))
                raise InputError(f"categories has {name!r}, which is neither a target nor a feature.{known}")
        return targets, features

    def _inputs(self, columns: Mapping[Hashable, NDArray[Any]], names: tuple[Hashable, ...]) -> NDArray[Any]:
        if len(names) == 1 and names[0] not in (self.categories or {}):
            values = self._settled(columns, names[0])
            if values.ndim > 1:
                return values
        whole = self.dtype is not None and not self.dtype.is_floating_point
        kind = np.int64 if whole else np.float64 if self.dtype == torch.float64 else np.float32
        blocks: list[NDArray[Any]] = []
        for name in names:
            if name in (self.categories or {}):
                codes = self._coded(columns, name)
                one_hot = np.zeros((len(codes), len((self.categories or {})[name])), dtype=kind)
                one_hot[np.arange(len(codes)), codes] = 1
                blocks.append(one_hot)
                continue
            values = self._settled(columns, name)
            require(
                values.ndim == 1,
                f"column {name!r} has rows of shape {values.shape[1:]}; give it alone, as features={name!r}.",
            )
            require(
                not whole or values.dtype.kind != "f",
                f"column {name!r} holds fractions and dtype is {self.dtype}; leave dtype out, or the column.",
            )
            with np.errstate(over="ignore"):  # what is beyond float32 is refused with its row, later
                blocks.append(values.astype(kind)[:, None])
        return np.concatenate(blocks, axis=1)

    def _targets(self, columns: Mapping[Hashable, NDArray[Any]], names: tuple[Hashable, ...]) -> NDArray[Any]:
        values = [
            self._coded(columns, name) if name in (self.categories or {}) else self._settled(columns, name)
            for name in names
        ]
        if isinstance(self.target, str) or not isinstance(self.target, Sequence):
            return values[0]
        for name, value in zip(names, values, strict=True):
            require(
                value.ndim == 1,
                f"column {name!r} has rows of shape {value.shape[1:]}; give it alone, as target={name!r}.",
            )
        return np.stack(values, axis=1)

    def _coded(self, columns: Mapping[Hashable, NDArray[Any]], name: Hashable) -> NDArray[np.int64]:
        return coded(name, columns[name], (self.categories or {})[name])

    def _settled(self, columns: Mapping[Hashable, NDArray[Any]], name: Hashable) -> NDArray[Any]:
        return settled(name, columns[name], finite=self.finite, advice=self._advice(name))

    def _advice(self, name: Hashable) -> str:
        public = f"give its public list, categories={{{name!r}: [...]}}"
        if name in listed(self.target):
            return f"{public}: a target becomes its place in the list."
        return f"{public}, or leave the column out with features=[...]."


def client_ids_of(table: Any, by: Names) -> Any:
    """One id per row: the values of a column, or tuples of those of several."""
    columns = listed(by)
    require(len(columns) > 0, "by is empty; name the column that says which client holds a row.")
    for name in columns:
        check_column(table, "by", name)
    values = [read_column(table, name) for name in columns]
    if len(values) == 1:
        return values[0]
    for name, value in zip(columns, values, strict=True):
        refuse_missing(name, value)
    return list(zip(*(value.tolist() for value in values), strict=True))


def partitions(source: Any, clients: int | None) -> Iterable[Any] | None:
    """The tables of a list or of a partitioner, one per client; None where there is one table for all."""
    if hasattr(source, "load_partition"):
        count = getattr(source, "num_partitions", clients)
        if count is None:
            raise InputError(
                "the data set does not say how many partitions it has; give their number, such as clients=100."
            )
        return (source.load_partition(number) for number in range(count))
    return source if isinstance(source, list | tuple) else None


def listed(names: Names) -> tuple[Hashable, ...]:
    """Names of columns, whether one is given or a list of them."""
    if isinstance(names, Sequence) and not isinstance(names, str | bytes):
        return tuple(names)
    return (names,)
