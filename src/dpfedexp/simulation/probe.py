"""Before the first round of a run whose local rate sets itself: two votes without an update choose the rate and the first clip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.accounting import Event, Sampling
from dpfedexp.accounting.events import Adjacency
from dpfedexp.local_rate import RADII, RATES
from dpfedexp.mechanisms.binned_vote import BinnedVote
from dpfedexp.noise import Noise
from dpfedexp.votes import Secure, Vote

RATE, CLIP = "local rate", "first clip"
"""What the two votes are called in the ledger."""
Values = Callable[[Tensor, Tensor], Tensor]
"""From clients and their bins to their answers, each between 0 and 1."""


@dataclass(frozen=True)
class Probe:
    """The two votes by their noise.

    Formal guarantee: that of `BinnedVote`, for each of the two; without noise nothing is promised.

    Attributes:
        rate_noise: the standard deviation on each bin's sum of shares in the vote on the rate; 0 where nothing is private.
        clip_noise: the same in the vote on the first clip.
        adjacency: between which data sets the answers must not tell.
        secure: what kind of noise.
    """

    rate_noise: float
    clip_noise: float
    adjacency: Adjacency
    secure: Secure = False

    def vote(self, name: str) -> BinnedVote:
        bins, noise = (len(RATES), self.rate_noise) if name == RATE else (len(RADII), self.clip_noise)
        return BinnedVote(Vote(name, noise=noise or 1e-9), bins, self.adjacency, self.secure)

    def events(self, sampling: Sampling) -> list[Event]:
        """What the two cost."""
        return [self.vote(name).event(sampling) for name in (RATE, CLIP)]

    def answers(
        self,
        name: str,
        chunks: Iterator[Tensor],
        values: Values,
        population: int,
        share: float,
        noise: Noise,
        own: Noise,
    ) -> tuple[Tensor, Tensor]:
        """The noisy means of the bins and the deviations of their noise, both [K].

        Args:
            name: which of the two votes.
            chunks: the clients that take part.
            values: what they answer.
            population: the public number of clients.
            share: the expected share of them that takes part.
            noise: where the noise comes from.
            own: where clients draw their bins from, under add-remove adjacency.
        """
        vote = self.vote(name)
        sums = torch.zeros(vote.bins, dtype=torch.float64)
        for clients in chunks:
            bins = vote.assigned(clients, own)
            sums += vote.collect(values(clients, bins), bins).cpu()
        counts = vote.counts(population, share).clamp_min(1.0)
        return vote.release(sums, counts, noise), vote.vote.noise / counts
