"""A vote without an update, asked in bins: each client answers in one bin, its own choice, and every bin's noisy mean is released.

For a probe before the first round: a whole histogram at the price of one vote.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfedexp.accounting.charges import two_party, votes_only
from dpfedexp.accounting.events import Adjacency, GaussianEvent, NoiseBy, Sampling
from dpfedexp.core.noise import Noise
from dpfedexp.core.noise.lattice import STRICT_EXCESS, masked_sum
from dpfedexp.core.votes import Secure, Vote, bin_sums, centred, release_bins, step_of
from dpfedexp.errors import checked, is_count, require


@checked
@dataclass(frozen=True)
class BinnedVote:
    """One vote over K bins.

    Formal guarantee: a client is in one bin, whichever it likes, and its share is within ±½ whatever it sends. So all the sums
    together move by at most ½ when the client is left out and by at most 1 when it is replaced, in the Euclidean norm; no other
    client's bin moves with it. Each bin gets noise of standard deviation `vote.noise` that is fixed before. Event: `votes_only`,
    one Gaussian query. In strict mode the noise is discrete Gaussian, charged at (1 + 2⁻²⁰)·μ.

    Args:
        vote: name, range, and the noise on the sum of shares in each bin.
        bins: how many there are.
        adjacency: between which data sets the release must not tell.
        secure: False for plain noise, True for noise on the lattice, "strict" for discrete noise.
        noise_by: "" for one server; with two aggregators, who of them adds the noise. Then the sums are made under masks, and the
            event is the one that either aggregator is charged with.
    """

    vote: Vote
    bins: int
    adjacency: Adjacency = "replace-one"
    secure: Secure = False
    noise_by: NoiseBy = ""

    def __post_init__(self) -> None:
        require(
            not self.noise_by or (self.adjacency == "replace-one" and bool(self.secure)),
            "a vote by two aggregators must be on the lattice and have adjacency 'replace-one'.",
        )
        require(is_count(self.bins), f"bins is {self.bins!r}; it must be a positive whole number.")
        require(self.vote.noise > 0, f"the vote {self.vote.name!r} has noise 0; it must be a positive number.")

    def collect(self, values: Tensor, bins: Tensor) -> Tensor:
        """Σ of shares by bin, from the clients' values in the vote's own range and their bins; sums of several chunks add."""
        if not self.noise_by:
            return bin_sums(values, bins, self.bins, self.vote, self.secure)
        step = step_of(self.vote, self.secure)
        units = (centred(values, self.vote) / step).round().to(torch.int64)
        rows = torch.zeros(len(units), self.bins, dtype=torch.int64, device=units.device)
        return masked_sum(rows.scatter_(1, bins.to(units.device)[:, None], units[:, None])).double() * step

    def release(self, sums: Tensor, count: float, noise: Noise) -> Tensor:
        """The noisy mean value in each bin over `count` clients, a public number, [K]."""
        return release_bins(sums, count, self.vote, noise, self.secure, self._draws)

    def deviation(self, count: float) -> float:
        """The standard deviation of the noise on each bin of a release over `count` clients."""
        return self.vote.width * self.vote.noise * math.sqrt(self._draws) / count

    def event(self, sampling: Sampling = Sampling()) -> GaussianEvent:
        """What the release costs."""
        votes = ((self.vote.name, self.vote.noise),)
        if self.noise_by:
            event = two_party(votes_only(votes), sampling, self.noise_by)
        else:
            event = votes_only(votes, self.adjacency, sampling)
        if not self.secure:
            return event
        event = replace(event, attained=False)
        return event.scaled(1.0 + STRICT_EXCESS) if self.secure == "strict" else event

    @property
    def _draws(self) -> int:
        return 2 if self.noise_by == "both" else 1
