"""Who holds which rows: the ways in which federated experiments deal a data set out to clients.

Each partitioner takes the labels (or the number of rows) and a numpy generator, and returns an `Assignment`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpfedexp.data.arrays import as_tensor, check_count, check_positive, check_seed
from dpfedexp.errors import InputError, require

_ATTEMPTS = 100


class Assignment(NamedTuple):
    """Client i holds `rows[offsets[i]:offsets[i + 1]]`."""

    rows: NDArray[np.int64]
    offsets: NDArray[np.int64]


def generator(seed: int) -> np.random.Generator:
    """Philox: the same draws on every machine."""
    return np.random.Generator(np.random.Philox(check_seed(seed)))


def class_labels(targets: Any) -> tuple[NDArray[np.int64], int]:
    """Labels as 0..K-1 and K, whatever integers they were."""
    tensor = as_tensor("targets", targets)
    require(
        not tensor.is_floating_point(),
        f"targets has dtype {str(tensor.dtype).removeprefix('torch.')}; splitting by class needs integer class labels.",
    )
    require(
        tensor.dim() == 1,
        f"targets has shape {tuple(tensor.shape)}; splitting by class needs one label per row, shape ({len(tensor)},).",
    )
    classes, labels = np.unique(tensor.numpy(), return_inverse=True)
    return labels.astype(np.int64), len(classes)


def iid(examples: int, clients: int, rng: np.random.Generator) -> Assignment:
    """A uniformly random split; sizes differ by at most one."""
    _check_enough(examples, clients, 1)
    return Assignment(rng.permutation(examples), _even_offsets(examples, clients))


def dirichlet(
    labels: NDArray[np.int64],
    classes: int,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    samples_per_client: int | None = None,
) -> Assignment:
    """Hsu et al. 2019: every client holds the same number of rows, with its own class mix q_i ~ Dirichlet(alpha · 1).

    Rows are drawn without replacement; a class that has run out gets probability zero and the rest are renormalised.
    """
    check_positive("alpha", alpha)
    _check_enough(len(labels), clients, 1)
    size = len(labels) // clients
    if samples_per_client is not None:
        check_count("samples_per_client", samples_per_client)
        require(
            samples_per_client <= size,
            f"samples_per_client is {samples_per_client}; {len(labels)} rows for {clients} clients allow up to {size}.",
        )
        size = samples_per_client
    mixes = rng.dirichlet(np.full(classes, float(alpha)), size=clients) if classes > 1 else np.ones((clients, 1))
    left = np.bincount(labels, minlength=classes)
    counts = np.zeros((clients, classes), dtype=np.int64)
    for client in range(clients):
        taken = counts[client]
        wanted = size
        while wanted:
            weights = np.where(left > 0, mixes[client], 0.0)
            total = weights.sum()
            # With a tiny alpha the whole mix can sit on classes that have run out.
            weights = weights / total if total > 0 else left / left.sum()
            draw = np.minimum(rng.multinomial(wanted, weights), left)
            taken += draw
            left -= draw
            wanted -= int(draw.sum())
    return _deal(labels, counts, rng)


def dirichlet_per_class(
    labels: NDArray[np.int64],
    classes: int,
    clients: int,
    alpha: float,
    rng: np.random.Generator,
    min_size: int = 0,
) -> Assignment:
    """Every class is split over the clients in Dirichlet(alpha · 1) proportions, so that sizes are unequal.

    The draw is repeated until every client holds at least `min_size` rows.
    """
    check_positive("alpha", alpha)
    check_count("min_size", min_size, least=0)
    _check_enough(len(labels), clients, min_size)
    pools = np.bincount(labels, minlength=classes)
    for _ in range(_ATTEMPTS):
        shares = rng.dirichlet(np.full(clients, float(alpha)), size=classes) if clients > 1 else np.ones((classes, 1))
        cuts = np.floor(np.cumsum(shares, axis=1) * pools[:, None]).astype(np.int64)
        cuts[:, -1] = pools
        counts = np.diff(np.minimum(cuts, pools[:, None]), axis=1, prepend=0).T
        if counts.sum(axis=1).min() >= min_size:
            return _deal(labels, counts, rng)
    raise InputError(
        f"min_size is {min_size}; none of {_ATTEMPTS} draws gave every one of {clients} clients that many of "
        f"{len(labels)} rows at alpha = {alpha:g}. Lower min_size, raise alpha, or use fewer clients."
    )


def shards(labels: NDArray[np.int64], clients: int, rng: np.random.Generator, shards_per_client: int = 2) -> Assignment:
    """McMahan et al. 2017: rows sorted by label, cut into equal shards, `shards_per_client` dealt to each client."""
    check_count("shards_per_client", shards_per_client)
    _check_enough(len(labels), clients, shards_per_client)
    shuffled = rng.permutation(len(labels))
    ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
    cuts = _even_offsets(len(labels), clients * shards_per_client)
    dealt = rng.permutation(clients * shards_per_client)
    lengths = np.diff(cuts)[dealt]
    rows = np.concatenate([ordered[cuts[shard] : cuts[shard + 1]] for shard in dealt])
    return Assignment(rows, _offsets(lengths.reshape(clients, shards_per_client).sum(axis=1)))


def _deal(labels: NDArray[np.int64], counts: NDArray[np.int64], rng: np.random.Generator) -> Assignment:
    """Random rows of each class, `counts[i, k]` of class k to client i."""
    shuffled = rng.permutation(len(labels))
    ordered = shuffled[np.argsort(labels[shuffled], kind="stable")]
    starts = _offsets(np.bincount(labels, minlength=counts.shape[1]))[:-1]
    dealt = counts.sum(axis=0)
    rows = np.concatenate([ordered[start : start + count] for start, count in zip(starts, dealt, strict=True)])
    owners = np.concatenate([np.repeat(np.arange(len(counts)), column) for column in counts.T])
    return Assignment(rows[np.argsort(owners, kind="stable")], _offsets(counts.sum(axis=1)))


def _offsets(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])


def _even_offsets(examples: int, parts: int) -> NDArray[np.int64]:
    return _offsets(examples // parts + (np.arange(parts) < examples % parts))


def _check_enough(examples: int, clients: int, each: int) -> None:
    check_count("clients", clients)
    require(
        examples >= clients * each,
        f"clients is {clients}; {examples} rows cannot give each of them at least {each}.",
    )
