"""FedAvg without privacy."""

from __future__ import annotations

from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.core.step_size import FixedRate
from dpfedexp.errors import checked


@checked
def fedavg(*, server_rate: float = 1.0) -> Algorithm:
    """FedAvg without privacy: the mean of the updates, every client weighing the same.

    Args:
        server_rate: a fixed global step size η_g.

    >>> fedavg().private
    False
    """
    return Algorithm("fedavg", "none", FixedRate(server_rate))
