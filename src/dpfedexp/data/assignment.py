"""Who holds which rows, as users write it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpfedexp.data.partition import Assignment
from dpfedexp.errors import InputError, require


def as_assignment(assignment: Any, examples: int, clients: int | None = None) -> Assignment:
    """From row indices per client, or from a client number per row where -1 means nobody.

    With `clients` there are that many, those without a row included: otherwise the last one that holds any is the last one.
    """
    split = _as_assignment(assignment, examples)
    if clients is None:
        return split
    held = len(split.offsets) - 1
    require(
        isinstance(clients, int) and clients >= held,
        f"clients is {clients!r}, but the assignment numbers {held}; it must be a whole number of at least that.",
    )
    rest = np.full(clients - held, split.offsets[-1], dtype=np.int64)
    return Assignment(split.rows, np.concatenate([split.offsets, rest]))


def _as_assignment(assignment: Any, examples: int) -> Assignment:
    if isinstance(assignment, Assignment):
        _check_rows(assignment.rows, examples)
        offsets = np.asarray(assignment.offsets)
        whole = len(offsets) >= 2 and offsets[0] == 0 and offsets[-1] == len(assignment.rows)
        require(
            bool(whole and (np.diff(offsets) >= 0).all()),
            f"assignment has offsets that do not rise from 0 to its {len(assignment.rows)} rows; "
            "client i holds rows[offsets[i]:offsets[i + 1]].",
        )
        return assignment
    if isinstance(assignment, torch.Tensor | np.ndarray) and assignment.ndim == 1 and assignment.dtype != object:
        return _from_owners(_integers("assignment", assignment), examples)
    if not isinstance(assignment, Iterable) or isinstance(assignment, str | bytes | dict):
        raise InputError(
            f"assignment is a {type(assignment).__name__}; "
            "give a list of row indices per client or a client number per row."
        )
    parts = list(assignment)
    require(len(parts) > 0, "assignment is empty; there must be at least one client.")
    if all(isinstance(part, int) or np.ndim(part) == 0 for part in parts):
        return _from_owners(_integers("assignment", parts), examples)
    rows = [_integers(f"assignment[{client}]", part) for client, part in enumerate(parts)]
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in rows])]).astype(np.int64)
    flat = np.concatenate(rows)
    _check_rows(flat, examples)
    return Assignment(flat, offsets)


def _from_owners(owners: NDArray[np.int64], examples: int) -> Assignment:
    require(
        len(owners) == examples,
        f"assignment has {len(owners)} client numbers and inputs has {examples} rows; give one number per row.",
    )
    low, high = int(owners.min(initial=0)), int(owners.max(initial=-1))
    require(low >= -1, f"assignment holds the client number {low}; numbers start at 0, and -1 leaves a row unused.")
    require(high >= 0, "assignment gives no row to any client; at least one client number must be 0 or more.")
    # A stray huge number (an id in place of an index) would otherwise mean that many empty clients.
    require(
        high < max(10 * examples, 1000),
        f"assignment holds the client number {high} for {examples} rows; number the clients 0, 1, 2, … without gaps, or give ids "
        "as client_ids=.",
    )
    order = np.argsort(owners, kind="stable")
    unused = int((owners < 0).sum())
    sizes = np.bincount(owners[owners >= 0], minlength=high + 1)
    return Assignment(order[unused:], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))


def _integers(field: str, values: Any) -> NDArray[np.int64]:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    require(array.ndim == 1, f"{field} has shape {array.shape}; it must be a flat list of whole numbers.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    require(array.dtype.kind in "iu", f"{field} has dtype {array.dtype}; it must hold whole numbers.")
    return array.astype(np.int64)


def _check_rows(rows: NDArray[np.int64], examples: int) -> None:
    if len(rows) == 0:
        return
    for row in (int(rows.min()), int(rows.max())):
        require(0 <= row < examples, f"assignment holds row {row}; inputs has rows 0 to {examples - 1}.")
