"""A vote without an update, asked in bins: each client answers in one bin only, and every bin's noisy mean is released.

For a probe before the first round: K settings are tried at once, each by a part of the clients, at the price of one vote.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfedexp.accounting.events import Adjacency, GaussianEvent, Sampling
from dpfedexp.accounting.events.charges import votes_only
from dpfedexp.arguments import checked
from dpfedexp.errors import is_count, require
from dpfedexp.noise import Noise
from dpfedexp.noise.lattice import STRICT_EXCESS
from dpfedexp.votes import Secure, Vote, bin_sums, release_bins


@checked
@dataclass(frozen=True)
class BinnedVote:
    """One vote over K bins.

    Formal guarantee: a client is in one bin, and its share is within ±½ whatever it sends. So all the sums together move by at most
    ½ when the client is left out and by at most 1 when it is replaced, in the Euclidean norm; each bin gets noise of standard
    deviation `vote.noise` that is fixed before. Event: `votes_only`, one Gaussian query. In strict mode the noise is discrete
    Gaussian, charged at (1 + 2⁻²⁰)·μ.

    Bins are drawn where it may be asked what a client that leaves would change: by their numbers, all clients behind it would
    change their bins too. That is under add-remove adjacency, and with `drawn`, so that the other adjacency's figure holds as well.

    Args:
        vote: name, range, and the noise on the sum of shares in each bin.
        bins: how many there are.
        adjacency: between which data sets the release must not tell.
        secure: False for plain noise, True for noise on the lattice, "strict" for discrete noise.
        drawn: whether clients draw their bins under replace-one adjacency too.
    """

    vote: Vote
    bins: int
    adjacency: Adjacency = "replace-one"
    secure: Secure = False
    drawn: bool = False

    @property
    def by_number(self) -> bool:
        """Whether a client's number says its bin."""
        return self.adjacency == "replace-one" and not self.drawn

    def __post_init__(self) -> None:
        require(is_count(self.bins), f"bins is {self.bins!r}; it must be a positive whole number.")
        require(self.vote.noise > 0, f"the vote {self.vote.name!r} has noise 0; it must be a positive number.")

    def assigned(self, clients: Tensor, noise: Noise) -> Tensor:
        """Each client's bin: its number modulo K, or one that is drawn from `noise`."""
        if self.by_number:
            return clients % self.bins
        return (noise.uniform(clients, 1)[:, 0] * self.bins).long().clamp_max(self.bins - 1).to(clients.device)

    def counts(self, population: int, share: float = 1.0) -> Tensor:
        """How many clients each bin is expected to have, which is public: of the population, a `share` takes part."""
        if not self.by_number:
            return torch.full((self.bins,), share * population / self.bins, dtype=torch.float64)
        return share * torch.bincount(torch.arange(population) % self.bins, minlength=self.bins).double()

    def collect(self, values: Tensor, bins: Tensor) -> Tensor:
        """Σ of shares by bin, from the clients' values in the vote's own range and their bins; sums of several chunks add."""
        return bin_sums(values, bins, self.bins, self.vote, self.secure)

    def release(self, sums: Tensor, counts: Tensor, noise: Noise) -> Tensor:
        """The noisy mean value of each bin, [K]."""
        return release_bins(sums, counts, self.vote, noise, self.secure)

    def event(self, sampling: Sampling = Sampling()) -> GaussianEvent:
        """What the release costs."""
        event = votes_only(((self.vote.name, self.vote.noise),), self.adjacency, sampling)
        if not self.secure:
            return event
        event = replace(event, attained=False)
        return event.scaled(1.0 + STRICT_EXCESS) if self.secure == "strict" else event
