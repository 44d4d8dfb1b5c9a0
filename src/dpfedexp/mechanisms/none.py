"""No privacy at all: what FedAvg and FedEXP are without noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from dpfedexp.accounting.events import NonPrivateEvent, Sampling
from dpfedexp.arguments import checked
from dpfedexp.core.clipping import AdaptiveClip, Clipped, row_norms
from dpfedexp.core.noise import Noise
from dpfedexp.core.sums import Release, Sums
from dpfedexp.core.votes import Vote, check_votes, collected, estimate, shares
from dpfedexp.errors import InputError
from dpfedexp.mechanisms.base import Mechanism, Terms
from dpfedexp.mechanisms.reports import Report, make_sums, total


@checked
@dataclass(frozen=True)
class NoPrivacy(Mechanism):
    """Sends the update as it is, and votes without noise. Guarantee: none; event: `NonPrivateEvent`."""

    kind = "none"
    is_local = False
    is_private = False

    clip: float = math.inf
    votes: tuple[Vote, ...] = ()

    @classmethod
    def check_terms(cls, terms: Terms) -> None:
        check_votes(terms.votes)

    @classmethod
    def bound(cls, terms: Terms) -> Mechanism:
        votes = tuple(Vote(ask.name, ask.low, ask.high, noise=0.0) for ask in terms.votes)
        return terms.drawn(NoPrivacy(math.inf if isinstance(terms.clip, AdaptiveClip) else terms.clip, votes))

    def width(self, dimension: int) -> int:
        return dimension

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        return Report(clipped.vectors, votes=shares(self.votes, clipped.within, ballots))

    def collect(self, report: Report) -> Sums:
        squares = row_norms(report.vector).square().sum()
        return make_sums(total(report.vector), squares, collected(report.votes, self.votes), len(report.vector))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        count = max(sums.count, 1)
        votes = {v.name: estimate(share, count, v) for v, share in zip(self.votes, sums.votes.tolist(), strict=True)}
        return Release(sums.vector / count, float(sums.squares) / count, votes, self.clip, variance=0.0)

    def noise_variance(self, denominator: float, count: float) -> float:
        return 0.0

    def event(self, sampling: Sampling) -> NonPrivateEvent:
        return NonPrivateEvent()

    def secure(self, strict: bool = False) -> Mechanism:
        raise InputError("secure is set, but the algorithm is not private: it adds no noise that could be secure.")
