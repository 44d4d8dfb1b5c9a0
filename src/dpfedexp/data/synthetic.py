"""The paper's linear regression, a synthetic problem with a known optimum.

It has one sample per client: w* ~ N(0, I); u_i ~ N(0, 0.1²); m_i ~ N(u_i·1, I); x_i ~ N(m_i, I); y_i = x_iᵀw*.
So E‖x_i‖² = 2.01 d, and more than d clients determine w* exactly.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfedexp.data.arrays import check_count
from dpfedexp.data.federation import Federation
from dpfedexp.data.partition import generator
from dpfedexp.errors import checked, require


@checked
@dataclass(frozen=True)
class SyntheticProblem:
    """The paper's linear regression: clients, and their common optimum w*."""

    federation: Federation
    optimum: Tensor

    def distance(self, w: Tensor) -> float:
        """‖w − w*‖, the paper's error measure."""
        d = self.optimum.numel()
        require(w.numel() == d, f"w has {w.numel()} numbers; this problem has dimension {d}.")
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
