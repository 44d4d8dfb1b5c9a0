"""Who takes part in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfedexp.accounting.events import Sampling
from dpfedexp.errors import require


class Draws(Protocol):
    """Where the choice comes from: the run's seed, or the operating system."""

    def generator(self, client: int) -> Any:
        """An object with the methods `random` and `choice` of a NumPy generator."""
        ...


class Participation(Protocol):
    def sampling(self, clients: int) -> Sampling:
        """What the accountant is told."""
        ...

    def expected(self, clients: int) -> float:
        """The public cohort size that sums are divided by."""
        ...

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        """The clients of one round, sorted."""
        ...


@dataclass(frozen=True)
class Full:
    """Every client in every round.

    >>> Full().expected(1000)
    1000.0
    """

    def sampling(self, clients: int) -> Sampling:
        return Sampling()

    def expected(self, clients: int) -> float:
        return float(clients)

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        return torch.arange(clients)


@dataclass(frozen=True)
class Poisson:
    """Every client independently with probability `rate`; how many came is private, so sums are divided by rate·M.

    >>> Poisson(0.1).expected(1000)
    100.0
    """

    rate: float

    def __post_init__(self) -> None:
        require(0 < self.rate <= 1, f"participation rate is {self.rate}; it must be above 0 and at most 1.")

    def sampling(self, clients: int) -> Sampling:
        return Sampling("poisson", self.rate)

    def expected(self, clients: int) -> float:
        return self.rate * clients

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        return torch.from_numpy(noise.generator(0).random(clients) < self.rate).nonzero().flatten()


@dataclass(frozen=True)
class FixedSize:
    """A uniformly random set of `count` clients, without replacement.

    >>> FixedSize(100).expected(1000)
    100.0
    """

    count: int

    def __post_init__(self) -> None:
        require(self.count > 0, f"cohort is {self.count}; it must be a positive whole number.")

    def sampling(self, clients: int) -> Sampling:
        require(
            self.count <= clients,
            f"cohort is {self.count}, but the federation has {clients} clients; it must be at most {clients}.",
        )
        return Sampling("fixed", self.count / clients) if self.count < clients else Sampling()

    def expected(self, clients: int) -> float:
        return float(self.count)

    def cohort(self, clients: int, noise: Draws) -> Tensor:
        return torch.from_numpy(noise.generator(0).choice(clients, self.count, replace=False)).sort().values
