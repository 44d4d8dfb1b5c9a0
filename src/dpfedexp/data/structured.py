"""Clients whose inputs are several arrays, for models that are called with several: model(*x) or model(**x)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpfedexp.arguments import checked
from dpfedexp.data.arrays import as_tensor, cast_inputs, check_finite
from dpfedexp.data.federation import Federation
from dpfedexp.data.partition import Assignment
from dpfedexp.errors import InputError, require

Inputs = tuple[Tensor, ...] | dict[str, Tensor]


@checked
class StructuredFederation:
    """Clients whose rows are several arrays: a tuple for model(*x), a dictionary for model(**x). Targets are one array.

    Example:
        >>> from dpfedexp.data import StructuredFederation
        >>> row = {"image": torch.zeros(4, 8, 8), "age": torch.zeros(4, 1)}, torch.zeros(4)
        >>> StructuredFederation.from_clients([row, row])
        StructuredFederation(2 clients, inputs image, age)
    """

    def __init__(
        self, inputs: Any, targets: Any, assignment: Any, *, allow_shared: bool = False, finite: bool = True
    ) -> None:
        self.arrays = _each(as_tensor, inputs)
        counts = {name: len(array) for name, array in _named(self.arrays)}
        require(
            len(set(counts.values())) == 1,
            f"inputs have {', '.join(f'{count} rows in {name!r}' for name, count in counts.items())}; there must be equally many.",
        )
        if finite:
            for name, array in _named(self.arrays):
                check_finite(f"inputs {name}", array)
        rows = torch.arange(next(iter(counts.values())))
        self.base = Federation(rows, targets, assignment, allow_shared=allow_shared, finite=finite)
        self._resident: dict[str, Inputs] = {}

    @classmethod
    @checked
    def from_clients(cls, clients: Iterable[tuple[Any, Any]], *, finite: bool = True) -> StructuredFederation:
        """From one (inputs, targets) pair per client, inputs being a tuple or a dictionary of arrays.

        Args:
            clients: the pairs; sizes may differ and a client may be empty.
            finite: False keeps NaN and infinities instead of refusing them.
        """
        pairs = [(_each(as_tensor, inputs), as_tensor("targets", targets)) for inputs, targets in clients]
        require(len(pairs) > 0, "clients is empty; there must be at least one client.")
        for number, (inputs, targets) in enumerate(pairs):
            for name, array in _named(inputs):
                require(
                    len(array) == len(targets),
                    f"clients[{number}] has {len(array)} rows in {name!r} and {len(targets)} targets; there must be one target "
                    "per row.",
                )
            require(
                [name for name, _ in _named(inputs)] == [name for name, _ in _named(pairs[0][0])],
                f"clients[{number}] has other inputs than the first client; all clients must have the same.",
            )
        names = [name for name, _ in _named(pairs[0][0])]
        joined = [torch.cat([_values(inputs)[at] for inputs, _ in pairs]) for at in range(len(names))]
        sizes = [len(targets) for _, targets in pairs]
        split = Assignment(np.arange(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
        together = dict(zip(names, joined, strict=True)) if isinstance(pairs[0][0], dict) else tuple(joined)
        return cls(together, torch.cat([targets for _, targets in pairs]), split, finite=finite)

    def __len__(self) -> int:
        return len(self.base)

    @property
    def sizes(self) -> Tensor:
        """Rows of each client."""
        return self.base.sizes

    def gather(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> tuple[Any, Tensor]:
        """Rows `positions[i]` of client `clients[i]`, cast: inputs [n, s, …] each, and targets [n, s, …]."""
        rows, targets = self.base.gather(clients, positions, device)
        return self._picked(rows, device), targets

    def client(self, index: int, device: torch.device | str | None = None) -> tuple[Any, Tensor]:
        """All that one client holds, cast as in `gather`."""
        rows, targets = self.base.client(index, device)
        return self._picked(rows, device), targets

    def contents(self) -> Iterator[Tensor]:
        """Everything that decides which rows a client holds and what is in them, as it is stored."""
        yield from (*_values(self.arrays), *self.base.contents())

    def _picked(self, rows: Tensor, device: torch.device | str | None) -> Inputs:
        where = str(device or "cpu")
        if where not in self._resident:
            self._resident[where] = _each(lambda name, array: array.to(where), self.arrays)
        return _each(lambda name, array: cast_inputs(array[rows]), self._resident[where])

    def __repr__(self) -> str:
        return f"StructuredFederation({len(self)} clients, inputs {', '.join(str(n) for n, _ in _named(self.arrays))})"

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_resident": {}}


def _values(inputs: Inputs) -> list[Tensor]:
    return list(inputs.values()) if isinstance(inputs, dict) else list(inputs)


def _named(inputs: Inputs) -> list[tuple[str, Tensor]]:
    if isinstance(inputs, dict):
        return list(inputs.items())
    return [(str(number), array) for number, array in enumerate(inputs)]


def _each(function: Callable[[str, Any], Tensor], inputs: Any) -> Inputs:
    if isinstance(inputs, Mapping) and inputs:
        return {str(name): function(f"inputs {name}", array) for name, array in inputs.items()}
    if isinstance(inputs, tuple | list) and inputs:
        return tuple(function(f"inputs {number}", array) for number, array in enumerate(inputs))
    raise InputError(
        f"inputs is a {type(inputs).__name__}; it must be a tuple or a dictionary of arrays. For one array use Federation."
    )
