"""Federations that deal one data set out to clients, as experiments do."""

from __future__ import annotations

from typing import Any, Self

import torch

from dpfedexp.data import partition, structure
from dpfedexp.data.arrays import Transform
from dpfedexp.data.client_rows import ClientRows
from dpfedexp.errors import checked, require


class Partitioned(ClientRows):
    """The constructors of a `Federation` that choose who holds which rows."""

    @classmethod
    @checked
    def iid(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Self:
        """A uniformly random split into clients whose sizes differ by at most one."""
        inputs = structure.as_inputs("inputs", inputs)
        return cls(
            inputs,
            targets,
            partition.iid(structure.rows(inputs), clients, partition.generator(seed)),
            dtype=dtype,
            transform=transform,
            allow_shared=allow_shared,
            finite=finite,
        )

    @classmethod
    @checked
    def dirichlet(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        alpha: float,
        seed: int = 0,
        samples_per_client: int | None = None,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Self:
        """Equal sizes, class mix of each client ~ Dirichlet(alpha) (Hsu et al. 2019)."""
        labels, classes = _labels(inputs, targets)
        rng = partition.generator(seed)
        split = partition.dirichlet(labels, classes, clients, alpha, rng, samples_per_client)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)

    @classmethod
    @checked
    def dirichlet_per_class(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        alpha: float,
        seed: int = 0,
        min_size: int = 0,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Self:
        """Unequal sizes: each class is split over the clients in Dirichlet(alpha) proportions."""
        labels, classes = _labels(inputs, targets)
        rng = partition.generator(seed)
        split = partition.dirichlet_per_class(labels, classes, clients, alpha, rng, min_size)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)

    @classmethod
    @checked
    def shards(
        cls,
        inputs: Any,
        targets: Any,
        *,
        clients: int,
        shards_per_client: int = 2,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
        allow_shared: bool = False,
        finite: bool = True,
    ) -> Self:
        """A few shards of the label-sorted data per client (McMahan et al. 2017)."""
        labels, _ = _labels(inputs, targets)
        split = partition.shards(labels, clients, partition.generator(seed), shards_per_client)
        return cls(inputs, targets, split, dtype=dtype, transform=transform, allow_shared=allow_shared, finite=finite)


def _labels(inputs: Any, targets: Any) -> tuple[Any, int]:
    labels, classes = partition.class_labels(targets)
    rows = structure.rows(structure.as_inputs("inputs", inputs))
    require(
        rows == len(labels), f"inputs has {rows} rows and targets has {len(labels)}; there must be one target per row."
    )
    return labels, classes
