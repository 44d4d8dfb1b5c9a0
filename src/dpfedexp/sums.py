"""The sums over clients that a round needs, and that add up whoever computed them.

Whatever the setting, the server of a round needs only numbers that add: chunks of clients, ranks of a distributed run and replies
of a deployment are all combined with `+`, so memory does not grow with the number of clients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Sums over clients, in double precision so that the order of adding does not show.

    Args:
        vector: Σ of what the clients sent, [d] (or [d+1] with the free rule's coordinate).
        squares: Σ of the squared-norm statistic that the step size asks for: ‖Δ_i‖², ‖c_i‖² or ŝ_i.
        within: how many updates were within the clip: what adaptive clipping asks for.
        count: how many clients were added.
    """

    vector: Tensor
    squares: Tensor
    within: Tensor
    count: int

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.vector + other.vector,
            self.squares + other.squares,
            self.within + other.within,
            self.count + other.count,
        )

    @staticmethod
    def zero(width: int, device: torch.device | str = "cpu") -> Sums:
        scalar = torch.zeros((), dtype=torch.float64, device=device)
        return Sums(torch.zeros(width, dtype=torch.float64, device=device), scalar, scalar.clone(), 0)
