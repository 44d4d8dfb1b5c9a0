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
        votes: Σ of the clients' shares of every vote, each within ±½ per client, [k].
        count: how many clients were added.
    """

    vector: Tensor
    squares: Tensor
    votes: Tensor
    count: int

    def __add__(self, other: Sums) -> Sums:
        return self._joined(self.vector + other.vector, other)

    def take(self, other: Sums) -> Sums:
        """The same as `+`, in this vector's own memory: for whoever adds many long ones and keeps none of the sums between."""
        return self._joined(self.vector.add_(other.vector), other)

    def _joined(self, vector: Tensor, other: Sums) -> Sums:
        return Sums(vector, self.squares + other.squares, self.votes + other.votes, self.count + other.count)

    def times(self, factor: float) -> Sums:
        """The sums of `factor` times as many clients, alike in every other way; the count stays that of those who were added."""
        return Sums(self.vector * factor, self.squares * factor, self.votes * factor, self.count)

    def to(self, device: torch.device) -> Sums:
        """The same sums elsewhere."""
        return Sums(self.vector.to(device), self.squares.to(device), self.votes.to(device), self.count)

    @staticmethod
    def zero(width: int, device: torch.device | str = "cpu", votes: int = 0) -> Sums:
        """The sums of nobody, for vectors of this width and so many votes."""
        vector, squares, shares = (torch.zeros(n, dtype=torch.float64, device=device) for n in ((width,), (), (votes,)))
        return Sums(vector, squares, shares, 0)
