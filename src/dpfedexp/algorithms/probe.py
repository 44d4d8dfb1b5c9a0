"""Before the first round of a run whose local rate sets itself: two votes without an update choose the rate and the first clip."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfedexp.accounting import Event, Sampling
from dpfedexp.accounting.events import Adjacency, NoiseBy
from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.local_rate import CLIP_SHARE, HELPED, RADII, RATE_SHARE, RATES, probe_noise
from dpfedexp.core.noise import Noise
from dpfedexp.core.votes import Ask, Secure, Vote
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Mechanism, mechanism_class
from dpfedexp.mechanisms.base import Beside
from dpfedexp.mechanisms.binned_vote import BinnedVote

RATE, CLIP = "local rate", "first clip"
"""What the two votes are called in the ledger."""
Places = Callable[[Tensor], Tensor]
"""From clients to the bins that they stand in, counted from 1; 0 for those that say nothing."""


@dataclass(frozen=True)
class Probe:
    """The two votes by their noise.

    Formal guarantee: that of `BinnedVote`, for each of the two; without noise nothing is promised.

    Attributes:
        rate_noise: the standard deviation on each bin's sum of shares in the vote on the rate; 0 where nothing is private.
        clip_noise: the same in the vote on the first clip.
        adjacency: between which data sets the answers must not tell.
        secure: what kind of noise.
        noise_by: with two aggregators, who of them adds it.
    """

    rate_noise: float
    clip_noise: float
    adjacency: Adjacency
    secure: Secure = False
    noise_by: NoiseBy = ""

    def vote(self, name: str) -> BinnedVote:
        bins, noise = (len(RATES), self.rate_noise) if name == RATE else (len(RADII), self.clip_noise)
        vote = Vote(name, -1.0, 1.0, noise=noise or 1e-9)
        return BinnedVote(vote, bins, self.adjacency, self.secure, self.noise_by)

    def events(self, sampling: Sampling, *, adaptive: bool) -> list[Event]:
        """What they cost: the clip is asked for only where it adapts."""
        return [self.vote(name).event(sampling) for name in ((RATE, CLIP) if adaptive else (RATE,))]

    def answers(
        self, name: str, chunks: Iterator[Tensor], places: Places, count: float, noise: Noise, pay: Callable[[], None]
    ) -> tuple[Tensor, float]:
        """Which share of the clients stands in each bin, noisy, [K], and the standard deviation of that noise.

        Args:
            name: which of the two votes.
            chunks: the clients that take part.
            places: where they stand.
            count: how many are expected to take part, a public number.
            noise: where the noise comes from.
            pay: called when all have answered and before anything of it exists outside.
        """
        vote = self.vote(name)
        sums = torch.zeros(vote.bins, dtype=torch.float64)
        for clients in chunks:
            found = places(clients)
            sums += vote.collect(torch.where(found > 0, 1.0, math.nan), (found - 1).clamp_min(0)).cpu()
        pay()
        return vote.release(sums, max(count, 1.0), noise), vote.deviation(max(count, 1.0))


def asked(
    algorithm: Algorithm, local: LocalOptimiser, rounds: int, sampling: Sampling, secure: Secure
) -> tuple[tuple[Ask, ...], Beside | None]:
    """The votes of every round, and what the probe costs beside the rounds: nothing where the rate is given."""
    if not local.automatic:
        return (), None
    kind = mechanism_class(algorithm.mechanism)
    if kind.is_local:
        raise InputError(
            "local lr is 'auto' in a local setting: clients would have to vote, and one vote drowns in its own noise. Choose the "
            "rate on public data, or in a simulation without privacy, and give it: Sgd(lr=0.1, …)."
        )
    if not kind.is_private:
        return (HELPED,), None
    adaptive = isinstance(algorithm.clip, AdaptiveClip)

    def beside(mechanism: Mechanism) -> list[Event]:
        return probe_of(mechanism, rounds, sampling, secure).events(sampling, adaptive=adaptive)

    return (HELPED,), beside


def probe_of(mechanism: Mechanism, rounds: int, sampling: Sampling, secure: Secure) -> Probe:
    """The probe of a run by its mechanism: its votes cost `RATE_SHARE` and `CLIP_SHARE` of what the rounds cost together."""
    if not mechanism.is_private:
        return Probe(0.0, 0.0, "replace-one")
    event: Any = mechanism.event(sampling)
    if not hasattr(event, "mu"):
        raise InputError(
            f"local lr is 'auto' with mechanism {mechanism.kind!r}, whose noise is not Gaussian; give a number, such as lr=0.1."
        )
    # Never more than a round costs: a target may be for each of them.
    rate, clip = (max(probe_noise(event.mu, rounds, share), 1.0 / event.mu) for share in (RATE_SHARE, CLIP_SHARE))
    # Masks are of whole numbers: what two aggregators add lies on the lattice, whatever the run's own noise does.
    return Probe(rate, clip, event.adjacency, secure or bool(event.noise_by), event.noise_by)
