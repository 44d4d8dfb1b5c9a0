"""Clients whose data are made up: a million of them take no memory, and the paper's linear regression has a known optimum.

The paper's problem has one sample per client:

w* ~ N(0, I); u_i ~ N(0, 0.1²); m_i ~ N(u_i·1, I); x_i ~ N(m_i, I); y_i = x_iᵀw*. So E‖x_i‖² = 2.01 d, and more than d
clients determine w* exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.arrays import Transform, as_tensor, cast_inputs, cast_targets, check_count, check_seed
from dpfedexp.data.federation import Federation, summary_of
from dpfedexp.data.partition import generator
from dpfedexp.errors import checked, require

_OPTIMUM, _CLIENT = 1, 2
"""Purposes: the second word of a Philox key."""
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
        return summary_of(self.sizes.numpy())

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


@checked
@dataclass(frozen=True)
class SyntheticProblem:
    """Clients and the w* that all of them agree on."""

    federation: Federation | Generated
    optimum: Tensor

    def distance(self, w: Tensor) -> float:
        """‖w − w*‖, the paper's measure of error."""
        require(
            w.numel() == self.optimum.numel(),
            f"w has {w.numel()} numbers; this problem has dimension {self.optimum.numel()}.",
        )
        return float(torch.linalg.vector_norm(w.detach().cpu().double().flatten() - self.optimum.double()))


@checked
def synthetic_regression(clients: int = 1000, dimension: int = 500, seed: int = 0) -> SyntheticProblem:
    """The problem of the paper's Fig. 1 (left): d = 500 for CDP, 100 for LDP."""
    check_count("clients", clients)
    check_count("dimension", dimension)
    rng = generator(seed)
    optimum = rng.standard_normal(dimension).astype(np.float32)
    means = rng.normal(scale=0.1, size=(clients, 1)) + rng.standard_normal((clients, dimension))
    inputs = (means + rng.standard_normal((clients, dimension))).astype(np.float32)
    # One row per client, each of its own: the assignment is the row's number.
    federation = Federation.from_arrays(inputs, _targets(inputs, optimum), np.arange(clients))
    return SyntheticProblem(federation, torch.from_numpy(optimum))


@checked
def synthetic_regression_stream(clients: int, dimension: int, seed: int = 0) -> SyntheticProblem:
    """The same distribution, made client by client from keyed draws: any number of clients in no memory."""
    check_count("dimension", dimension)
    check_seed(seed)
    optimum = np.random.Generator(np.random.Philox(key=[seed, _OPTIMUM])).standard_normal(dimension).astype(np.float32)

    def make(ids: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        draws = _keyed_normals(seed, ids, dimension + 1)
        # x_i - u_i is the sum of two independent standard normals, so one draw of variance 2 has its distribution.
        inputs = (0.1 * draws[:, :1] + np.sqrt(2.0) * draws[:, 1:]).astype(np.float32)
        return inputs[:, None, :], _targets(inputs, optimum)[:, None]

    return SyntheticProblem(Generated(clients, 1, make), torch.from_numpy(optimum))


def _targets(inputs: NDArray[np.float32], optimum: NDArray[np.float32]) -> NDArray[np.float32]:
    """xᵀw* of the rounded x and w*, in double precision, so that w* solves the problem to one rounding."""
    targets: NDArray[np.float64] = np.einsum("nd,d->n", inputs, optimum, dtype=np.float64)
    return targets.astype(np.float32)


def _keyed_normals(seed: int, clients: NDArray[np.int64], count: int) -> NDArray[np.float64]:
    """`count` standard normals per client from a stream of its own: the client's number is a word of the counter."""
    bits = np.random.Philox(key=[seed, _CLIENT])
    rng = np.random.Generator(bits)
    # Rewinding one generator costs a tenth of making a new one.
    state = bits.state
    normals = np.empty((len(clients), count))
    for row, client in zip(normals, clients, strict=True):
        state["state"]["counter"][:] = (0, client, 0, 0)
        bits.state = state
        rng.standard_normal(out=row)
    return normals
