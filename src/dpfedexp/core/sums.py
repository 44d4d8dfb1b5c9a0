"""What a round adds up, and what it releases.

Whatever the setting, the server of a round needs only numbers that add: chunks of clients, ranks of a distributed run and replies
of a deployment are all combined with `+`, so memory does not grow with the number of clients.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.core.votes import WITHIN
from dpfedexp.errors import InputError, checked


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
        return Sums(self.vector.to(device), self.squares.to(device), self.votes.to(device), self.count)

    @staticmethod
    def zero(width: int, device: torch.device | str = "cpu", votes: int = 0) -> Sums:
        """All-zero sums, for vectors of this width and so many votes."""
        vector, squares, shares = (torch.zeros(n, dtype=torch.float64, device=device) for n in ((width,), (), (votes,)))
        return Sums(vector, squares, shares, 0)


@checked
@dataclass(frozen=True)
class Release:
    """What leaves the mechanism, and may be seen by anyone.

    Args:
        c_bar: the mean update that moves the model.
        statistic: the scalar that the step-size rule asks for, None where it asks for none.
        votes: the noisy mean of every vote in its own range, by name; empty where there is none.
        clip: the radius C that was in force.
        sigma: the standard deviation of the noise in each coordinate of a client's own report, 0 where it has none.
        variance: of the noise in each coordinate of `c_bar`, or an upper bound of it, from public numbers; infinite where the
            mechanism does not say.
    """

    c_bar: Tensor
    statistic: float | None
    votes: dict[str, float]
    clip: float
    sigma: float = 0.0
    variance: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "votes", dict(self.votes or {}))

    @property
    def within(self) -> float | None:
        """The noisy fraction of clients within the clip, None without adaptive clipping."""
        return self.votes.get(WITHIN)

    @property
    def norm(self) -> float:
        """‖c̄‖."""
        return float(torch.linalg.vector_norm(self.c_bar, dtype=torch.float64))

    @property
    def numerator(self) -> float:
        """The statistic, for a rule that can't do without."""
        if self.statistic is None:
            raise InputError("the mechanism releases no statistic for this step-size rule; use one that needs none.")
        return self.statistic
