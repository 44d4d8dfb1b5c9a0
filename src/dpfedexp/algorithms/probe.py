"""Before the first round of a run whose local rate sets itself: two votes without an update choose the rate and the first clip."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.accounting import Event, Sampling
from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.algorithms.participation import Participation
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.local_rate import CLIP_SHARE, HELPED, RADII, RATE_SHARE, RATES
from dpfedexp.core.votes import HALF, Ask, Secure
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Mechanism, mechanism_class
from dpfedexp.mechanisms.base import Beside

UPDATE, RATE, CLIP = "update", "local rate", "first clip"
"""What clients are asked for: an update, or one of the two votes, which the ledger calls by these names."""


@dataclass(frozen=True)
class Probe:
    """The mechanisms of the two votes.

    Formal guarantee: a client is in one bin, whichever it likes, and what it sends is clipped to norm ½. So all the bins together
    move by at most ½ when the client is left out and by at most 1 when it is replaced, and each has noise that is fixed before.
    The event is one Gaussian query (`votes_only`). Without noise nothing is promised.
    """

    rate: Mechanism
    clip: Mechanism

    def mechanism(self, purpose: str) -> Mechanism:
        return self.rate if purpose == RATE else self.clip

    def events(self, sampling: Sampling, *, adaptive: bool) -> list[Event]:
        """What they cost: the clip is asked for only where it adapts."""
        return [self.mechanism(purpose).event(sampling) for purpose in ((RATE, CLIP) if adaptive else (RATE,))]


def in_bins(places: Tensor, bins: int) -> Tensor:
    """What clients send for their places, counted from 1: ½ in that bin; nothing at place 0, for those that abstain, [n, bins]."""
    rows = torch.zeros(len(places), bins + 1, device=places.device)
    rows[torch.arange(len(places), device=places.device), places] = HALF
    return rows[:, 1:]


def bins_of(purpose: str) -> int:
    """How many answers a question has; 0 where an update is asked for."""
    return {RATE: len(RATES), CLIP: len(RADII)}.get(purpose, 0)


def asked(
    algorithm: Algorithm, local: LocalOptimiser, rounds: int, sampling: Sampling
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
        return probe_of(mechanism, rounds, sampling).events(sampling, adaptive=adaptive)

    return (HELPED,), beside


def probe_of(mechanism: Mechanism, rounds: int, sampling: Sampling) -> Probe:
    """The probe of a run by its mechanism: its votes cost `RATE_SHARE` and `CLIP_SHARE` of what the rounds cost together."""
    mu = getattr(mechanism.event(sampling), "mu", math.inf)
    # Never more than a round costs: a target may be for each of them.
    rate, clip = (max(1.0 / (mu * math.sqrt(share * rounds)), 1.0 / mu) for share in (RATE_SHARE, CLIP_SHARE))
    return Probe(mechanism.asking(RATE, rate), mechanism.asking(CLIP, clip))


def bind(
    algorithm: Algorithm,
    local: LocalOptimiser | None,
    dimension: int,
    population: int,
    participation: Participation,
    rounds: int,
    secure: Secure,
    votes: tuple[Ask, ...] = (),
) -> tuple[Mechanism, Probe | None]:
    """The mechanism of a run's rounds, and the probe before them where the rate sets itself.

    Formal guarantee: the rounds and the probe together stay within the algorithm's target. The server of a run and every node that
    finds its settings announced get the same two.
    """
    sampling, cohort = participation.sampling(population), participation.expected(population)
    asks, beside = ((), None) if local is None else asked(algorithm, local, rounds, sampling)
    mechanism = algorithm.bind(dimension, cohort, sampling, rounds, secure, votes=(*asks, *votes), beside=beside)
    return mechanism, probe_of(mechanism, rounds, sampling) if asks else None
