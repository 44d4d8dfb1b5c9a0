"""Synthetic clients: generated on demand, and the paper's linear regression with a known optimum.

The paper's problem has one sample per client: w* ~ N(0, I); u_i ~ N(0, 0.1²); m_i ~ N(u_i·1, I); x_i ~ N(m_i, I); y_i = x_iᵀw*.
So E‖x_i‖² = 2.01 d, and more than d clients determine w* exactly.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.arrays import Transform, as_tensor, cast_inputs, cast_targets, check_count
from dpfedexp.data.federation import Federation
from dpfedexp.data.partition import generator
from dpfedexp.errors import checked, require

Maker = Callable[[NDArray[np.int64]], tuple[Any, Any]]


@checked
class GeneratedClients:
    """`clients` clients with `size` rows each; `make(client_ids)` returns inputs [n, size, …] and targets [n, size, …].

    The result of `make` for a client must depend on that client's number alone, for example by keyed draws.
    """

    def __init__(self, clients: int, size: int, make: Maker, *, transform: Transform | None = None) -> None:
        self.sizes = torch.tensor([check_count("size", size)]).expand(check_count("clients", clients))
        self.make, self.transform = make, transform

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(
        self, clients: Tensor | Sequence[int], positions: Tensor, device: torch.device | str | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return rows `positions[i]` (0 … size-1) of client `clients[i]`, cast: inputs [n, s, …] and targets [n, s, …].

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
        chosen = torch.arange(len(clients)).unsqueeze(1), positions
        return self._cast(inputs[chosen], targets[chosen], device)

    def client(self, index: int, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """All rows of one client, cast and transformed for a model."""
        inputs, targets = self._make(torch.tensor([index]))
        return self.prepare(inputs[0], targets[0], device)

    def prepare(self, inputs: Any, targets: Any, device: torch.device | str | None = None) -> tuple[Tensor, Tensor]:
        """Cast and transform other data, such as a test set, like the clients' data."""
        cast, held_out = self._cast(inputs, targets, device)
        return self.transform(cast) if self.transform else cast, held_out

    def _cast(self, inputs: Any, targets: Any, device: torch.device | str | None) -> tuple[Tensor, Tensor]:
        cast = cast_inputs(as_tensor("inputs", inputs).to(device))
        return cast, cast_targets(as_tensor("targets", targets).to(device))

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
    """The paper's linear regression: clients, and their common optimum w*."""

    federation: Federation
    optimum: Tensor

    def distance(self, w: Tensor) -> float:
        """‖w − w*‖, the paper's error measure."""
        require(
            w.numel() == self.optimum.numel(),
            f"w has {w.numel()} numbers; this problem has dimension {self.optimum.numel()}.",
        )
        return float(torch.linalg.vector_norm(w.detach().cpu().double().flatten() - self.optimum.double()))


@checked
def synthetic_regression(clients: int = 1000, dimension: int = 500, seed: int = 0) -> SyntheticProblem:
    """Generate the problem of the paper's Fig. 1 (left): d = 500 for CDP, 100 for LDP."""
    check_count("clients", clients)
    check_count("dimension", dimension)
    rng = generator(seed)
    optimum = rng.standard_normal(dimension).astype(np.float32)
    means = rng.normal(scale=0.1, size=(clients, 1)) + rng.standard_normal((clients, dimension))
    inputs = (means + rng.standard_normal((clients, dimension))).astype(np.float32)
    # xᵀw* of the float32 x and w*, computed in double precision, so that w* solves the problem up to one rounding.
    targets = np.einsum("nd,d->n", inputs, optimum, dtype=np.float64)
    # One row per client: row i belongs to client i.
    federation = Federation.from_arrays(inputs, targets.astype(np.float32), np.arange(clients))
    return SyntheticProblem(federation, torch.from_numpy(optimum))
