"""The paper's synthetic problem: linear regression with one sample per client and a known optimum.

w* ~ N(0, I); u_i ~ N(0, 0.1²); m_i ~ N(u_i·1, I); x_i ~ N(m_i, I); y_i = x_iᵀw*. So E‖x_i‖² = 2.01 d, and more than d
clients determine w* exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.arrays import check_count, check_seed
from dpfedexp.data.federation import Federation
from dpfedexp.data.generated import Generated
from dpfedexp.data.partition import generator
from dpfedexp.errors import checked, require

_OPTIMUM, _CLIENT = 1, 2
"""Purposes: the second word of a Philox key."""


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
