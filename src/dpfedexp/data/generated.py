"""Clients whose data are made when they are asked for, so that a million of them take no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.arrays import Transform, as_tensor, cast_inputs, cast_targets, check_count
from dpfedexp.errors import checked, require

Maker = Callable[[NDArray[np.int64]], tuple[Any, Any]]


@checked
class Generated:
    """`clients` clients with `size` rows each; `make(client_ids)` returns inputs [n, size, …] and targets [n, size, …].

    What `make` returns for a client must depend on that client's number alone, not on who else is asked for;
    draws keyed by the client's number do that.
    """

    def __init__(
        self,
        clients: int,
        size: int,
        make: Maker,
        *,
        dtype: torch.dtype | None = None,
        transform: Transform | None = None,
    ) -> None:
        self.sizes = torch.tensor([check_count("size", size)]).expand(check_count("clients", clients))
        self.make = make
        self.dtype = dtype
        self.transform = transform

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rows `positions[i]` (0 … size-1) of client `clients[i]`, cast: inputs [n, s, …] and targets [n, s, …].

        The transform is not applied: trainers apply it to one client at a time, with that client's own random stream.
        """
        clients = torch.as_tensor(clients, dtype=torch.int64).cpu()
        positions = torch.as_tensor(positions, dtype=torch.int64).cpu()
        size = int(self.sizes[0])
        require(
            bool(((positions >= 0) & (positions < size)).all()),
            f"positions reach outside the rows that a client holds; they run from 0 to {size - 1}.",
        )
        inputs, targets = self._make(clients)
        if not torch.equal(positions, torch.arange(size).expand(len(clients), size)):
            chosen = torch.arange(len(clients)).unsqueeze(1), positions
            inputs, targets = inputs[chosen], targets[chosen]
        return self._cast(inputs, targets, device)

    def client(self, index: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """All that one client holds, cast and transformed as a model takes it."""
        inputs, targets = self._make(torch.tensor([index]))
        return self.prepare(inputs[0], targets[0], device)

    def prepare(self, inputs: Any, targets: Any, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Other data, such as a test set, cast and transformed as the clients' are."""
        cast, held_out = self._cast(inputs, targets, device)
        return self.transform(cast) if self.transform else cast, held_out

    def _cast(self, inputs: Any, targets: Any, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        cast = cast_inputs(as_tensor("inputs", inputs).to(device), self.dtype)
        return cast, cast_targets(as_tensor("targets", targets).to(device), self.dtype)

    def summary(self) -> dict[str, Any]:
        size = int(self.sizes[0])
        return {
            "clients": len(self),
            "examples": len(self) * size,
            "size_min": size,
            "size_median": float(size),
            "size_max": size,
            "classes": None,
            "classes_per_client": None,
        }

    def __repr__(self) -> str:
        return f"Generated({len(self)} clients, {int(self.sizes[0])} rows each)"

    def _make(self, clients: Tensor) -> tuple[Tensor, Tensor]:
        require(
            clients.numel() == 0 or (int(clients.min()) >= 0 and int(clients.max()) < len(self)),
            f"clients holds a number outside 0 to {len(self) - 1}.",
        )
        made = self.make(clients.numpy())
        inputs, targets = as_tensor("inputs", made[0]), as_tensor("targets", made[1])
        expected = (len(clients), int(self.sizes[0]))
        for name, tensor in (("inputs", inputs), ("targets", targets)):
            require(
                tuple(tensor.shape[:2]) == expected,
                f"make returned {name} of shape {tuple(tensor.shape)}; it must begin with (clients, size), {expected}.",
            )
        return inputs, targets
