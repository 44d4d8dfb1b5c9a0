"""Where random draws come from: keyed streams in a simulation, the operating system in a run that protects somebody."""

from typing import Protocol

import torch
from torch import Tensor


class Noise(Protocol):
    """Randomness for one purpose of one round. Rows are keyed by client, so a chunk's draws do not depend on its neighbours.

    A simulation's noise comes from its seed; a deployment's from the operating system, where the keys mean nothing.
    """

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Independent standard normal rows, [len(clients), width]."""
        ...

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        """Independent uniform rows on [0, 1), [len(clients), width], float64 on the CPU."""
        ...
