"""Assignments of rows to clients: by index, by client id, or by a partitioner.

Each partitioner takes the labels (or the number of rows) and a numpy generator, and returns an `Assignment`.
"""

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.arrays import as_array, as_tensor, check_count
from dpfedexp.errors import InputError, is_number, require


class Assignment(NamedTuple):
    """Rows per client: client i holds `rows[offsets[i]:offsets[i + 1]]`."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]


def consecutive_rows(sizes: Sequence[int]) -> Assignment:
    return Assignment(np.arange(sum(sizes)), _offsets(sizes))


def as_assignment(assignment: Any, examples: int, clients: int | None = None) -> Assignment:
    """Build an assignment from row indices per client, or from a client number per row (-1: unassigned).

    With `clients` there are that many clients, including those without rows; otherwise the last client is the last one with rows.
    """
    split = _as_assignment(assignment, examples)
    if clients is None:
        return split
    held = len(split.offsets) - 1
    known = isinstance(clients, int) and clients >= held
    require(known, f"clients is {clients!r}, but there are {held} already; it must be at least as many.")
    rest = np.full(clients - held, split.offsets[-1], dtype=np.int64)
    return Assignment(split.rows, np.concatenate([split.offsets, rest]))


def _as_assignment(assignment: Any, examples: int) -> Assignment:
    if isinstance(assignment, Assignment):
        _check_rows(assignment.rows, examples)
        offsets = np.asarray(assignment.offsets)
        whole = len(offsets) >= 2 and offsets[0] == 0 and offsets[-1] == len(assignment.rows)
        rising = bool(whole and (np.diff(offsets) >= 0).all())
        require(rising, f"assignment has offsets that do not rise from 0 to its {len(assignment.rows)} rows.")
        return assignment
    if isinstance(assignment, Tensor | np.ndarray) and assignment.ndim == 1 and assignment.dtype != object:
        return _from_owners(_integers("assignment", assignment), examples)
    if not isinstance(assignment, Iterable) or isinstance(assignment, str | bytes | dict):
        kind = type(assignment).__name__
        raise InputError(f"assignment is a {kind}; give a list of row indices per client or a client number per row.")
    parts = list(assignment)
    require(len(parts) > 0, "assignment is empty; there must be at least one client.")
    if all(isinstance(part, int) or np.ndim(part) == 0 for part in parts):
        return _from_owners(_integers("assignment", parts), examples)
    rows = [_integers(f"assignment[{client}]", part) for client, part in enumerate(parts)]
    flat = np.concatenate(rows)
    _check_rows(flat, examples)
    return Assignment(flat, _offsets([len(part) for part in rows]))


def _from_owners(owners: NDArray[np.int64], examples: int) -> Assignment:
    count = len(owners)
    require(count == examples, f"assignment has {count} client numbers for {examples} rows; give one number per row.")
    low, high = int(owners.min(initial=0)), int(owners.max(initial=-1))
    require(low >= -1, f"assignment holds the client number {low}; numbers start at 0, and -1 leaves a row unused.")
    require(high >= 0, "assignment gives no row to any client; at least one client number must be 0 or more.")
    # An id in place of an index would otherwise create that many empty clients.
    number = f"assignment holds the client number {high} for {examples} rows"
    require(high < max(10 * examples, 1000), f"{number}; number clients 0, 1, 2, …, or give ids as client_ids=.")
    order = np.argsort(owners, kind="stable")
    unused = int((owners < 0).sum())
    sizes = np.bincount(owners[owners >= 0], minlength=high + 1)
    return Assignment(order[unused:], _offsets(sizes))


def _integers(field: str, values: Any) -> NDArray[np.int64]:
    array = np.asarray(as_array(values) if isinstance(values, Tensor) else values)
    require(array.ndim == 1, f"{field} has shape {array.shape}; it must be a flat list of whole numbers.")
    if array.size == 0:
        return np.zeros(0, dtype=np.int64)
    require(array.dtype.kind in "iu", f"{field} has dtype {array.dtype}; it must hold whole numbers.")
    return array.astype(np.int64)


def _check_rows(rows: NDArray[np.int64], examples: int) -> None:
    for row in (int(rows.min()), int(rows.max())) if len(rows) else ():
        require(0 <= row < examples, f"assignment holds row {row}; inputs has rows 0 to {examples - 1}.")


def by_ids(
    field: str, ids: Any, examples: int, clients: int | None = None
) -> tuple[Assignment, tuple[Hashable | None, ...]]:
    """Build an assignment from one client id per row; returns it and the ids in the order of clients.

    Clients are numbered in the order of their sorted ids (of first appearance, if ids can't be sorted), so that the numbers do not
    depend on the order of rows. If `clients` exceeds the number of ids, the further clients hold no rows and have the name None.
    """
    codes, names = _numbered(field, ids)
    require(len(codes) == examples, f"{field} has {len(codes)} ids and there are {examples} rows; give one per row.")
    split = as_assignment(codes, examples, clients)
    return split, (*names, *[None] * (len(split.offsets) - 1 - len(names)))


def is_missing(value: Any) -> bool:
    """Whether a value is None, NaN, or a missing value of pandas."""
    if value is None or type(value).__name__ in ("NAType", "NaTType"):
        return True
    return isinstance(value, float | np.floating | np.datetime64 | np.timedelta64) and bool(value != value)


def _numbered(field: str, ids: Any) -> tuple[NDArray[np.int64], list[Hashable]]:
    values = as_array(ids)
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping) or getattr(values, "ndim", 1) > 1:
        raise InputError(f"{field} is a {type(ids).__name__}; give one client id per row, as a list or an array.")
    if isinstance(values, np.ndarray) and values.dtype.kind in "iub":
        unique, codes = np.unique(values, return_inverse=True)
        return codes.astype(np.int64, copy=False), unique.tolist()
    listed = list(values) if not isinstance(values, np.ndarray) or values.dtype.kind in "Mm" else values.tolist()
    if any(issubclass(kind, Tensor) for kind in set(map(type, listed))):
        # A tensor is hashed by its identity, so every row would be a client of its own.
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


def generator(seed: int) -> np.random.Generator:
    """A Philox generator, which draws the same numbers on every machine."""
    whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    require(whole and 0 <= seed < 1 << 64, f"seed is {seed!r}; it must be a whole number from 0 to 2^64 - 1.")
    return np.random.Generator(np.random.Philox(int(seed)))


def class_labels(targets: Any) -> NDArray[np.int64]:
    """Map labels to 0..K-1, each of which occurs."""
    tensor = as_tensor("targets", targets)
    kind = str(tensor.dtype).removeprefix("torch.")
    require("float" not in kind, f"targets has dtype {kind}; splitting by class needs integer class labels.")
    require(tensor.dim() == 1, f"targets has shape {tuple(tensor.shape)}; splitting by class needs one label per row.")
    return np.unique(tensor.numpy(), return_inverse=True)[1].astype(np.int64)


def iid(examples: int, clients: int, rng: np.random.Generator) -> Assignment:
    """Split uniformly at random; sizes differ by at most one."""
    _check_enough(examples, clients, 1)
    sizes = examples // clients + (np.arange(clients) < examples % clients)
    return Assignment(rng.permutation(examples), _offsets(sizes))


def dirichlet(
    labels: NDArray[np.int64],
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    samples_per_client: int | None = None,
) -> Assignment:
    """Hsu et al. 2019: every client holds the same number of rows, with its own class mix q_i ~ Dirichlet(alpha · 1).

    Rows are drawn without replacement; a class that has run out gets probability zero and the rest are renormalized.
    """
    _check_alpha(alpha)
    _check_enough(len(labels), clients, 1)
    most = len(labels) // clients
    size = most if samples_per_client is None else check_count("samples_per_client", samples_per_client)
    require(size <= most, f"samples_per_client is {size}; {len(labels)} rows for {clients} clients allow up to {most}.")
    left = np.bincount(labels)
    mixes = rng.dirichlet(np.full(len(left), float(alpha)), size=clients) if len(left) > 1 else np.ones((clients, 1))
    counts = np.zeros((clients, len(left)), dtype=np.int64)
    for taken, mix in zip(counts, mixes, strict=True):
        while wanted := size - int(taken.sum()):
            weights = np.where(left > 0, mix, 0.0)
            total = weights.sum()
            # With a tiny alpha all of the mix can be on classes that have run out.
            weights = weights / total if total > 0 else left / left.sum()
            draw = np.minimum(rng.multinomial(wanted, weights), left)
            taken += draw
            left -= draw
    return _deal(labels, counts, rng)


def dirichlet_per_class(labels: NDArray[np.int64], clients: int, alpha: float, rng: np.random.Generator) -> Assignment:
    """Divide every class among the clients in Dirichlet(alpha · 1) proportions, so that sizes are unequal."""
    _check_alpha(alpha)
    _check_enough(len(labels), clients, 0)
    pools = np.bincount(labels)
    shares = rng.dirichlet(np.full(clients, float(alpha)), size=len(pools)) if clients > 1 else np.ones((len(pools), 1))
    cuts = np.floor(np.cumsum(shares, axis=1) * pools[:, None]).astype(np.int64)
    cuts[:, -1] = pools
    return _deal(labels, np.diff(np.minimum(cuts, pools[:, None]), axis=1, prepend=0).T, rng)


def shards(labels: NDArray[np.int64], clients: int, rng: np.random.Generator, shards_per_client: int = 2) -> Assignment:
    """McMahan et al. 2017: sort rows by label, cut them into equal shards, give `shards_per_client` random ones to each client."""
    check_count("shards_per_client", shards_per_client)
    _check_enough(len(labels), clients, shards_per_client)
    pieces = np.array_split(_by_label(labels, rng), clients * shards_per_client)
    dealt = [pieces[number] for number in rng.permutation(len(pieces))]
    sizes = np.array([len(piece) for piece in dealt]).reshape(clients, shards_per_client).sum(axis=1)
    return Assignment(np.concatenate(dealt), _offsets(sizes))


def _check_alpha(alpha: Any) -> None:
    require(is_number(alpha) and 0 < alpha < math.inf, f"alpha is {alpha!r}; it must be a number greater than 0.")


def _by_label(labels: NDArray[np.int64], rng: np.random.Generator) -> NDArray[np.int64]:
    shuffled = rng.permutation(len(labels))
    return shuffled[np.argsort(labels[shuffled], kind="stable")]


def _deal(labels: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator) -> Assignment:
    """Assign random rows of each class: `counts[i, k]` rows of class k to client i."""
    ordered = _by_label(labels, rng)
    starts = _offsets(np.bincount(labels))[:-1]
    dealt = counts.sum(axis=0)
    rows = np.concatenate([ordered[start : start + count] for start, count in zip(starts, dealt, strict=True)])
    owners = np.concatenate([np.repeat(np.arange(len(counts)), column) for column in counts.T])
    return Assignment(rows[np.argsort(owners, kind="stable")], _offsets(counts.sum(axis=1)))


def _offsets(sizes: NDArray[np.int64] | Sequence[int]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def _check_enough(examples: int, clients: int, each: int) -> None:
    check_count("clients", clients)
    require(examples >= clients * each, f"clients is {clients}; {examples} rows can't give each of them {each}.")
