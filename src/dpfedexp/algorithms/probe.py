"""What a run asks of its clients beside updates: votes on the local rate and the first clip, and measurements of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.accounting import Event, Sampling
from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.algorithms.round import Participation
from dpfedexp.core.client_metrics import EVALUATION, WIDTH
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.local_rate import CLIP_SHARE, HELPED, RADII, RATE_SHARE, RATES
from dpfedexp.core.sums import HALF, Ask, Secure
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Mechanism, mechanism_class
from dpfedexp.mechanisms.base import Beside

UPDATE, RATE, CLIP = "update", "local rate", "first clip"
"""What clients are asked for: an update, one of the two votes, or `EVALUATION`; the ledger has these names."""
EVALUATION_SHARE = 0.019
"""What all measurements by clients cost together, as a share of μ² of the rounds: less than 1% more noise in the updates."""


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
    return {RATE: len(RATES), CLIP: len(RADII), EVALUATION: WIDTH}.get(purpose, 0)


def asked(
    algorithm: Algorithm, local: LocalOptimiser | None, rounds: int, sampling: Sampling, evaluations: int = 0
) -> tuple[tuple[Ask, ...], Beside | None]:
    """The votes of every round, and what else is released beside the rounds."""
    kind, automatic = mechanism_class(algorithm.mechanism), local is not None and local.automatic
    votes = (HELPED,) if automatic else ()
    if evaluations and kind.is_local:
        raise InputError(
            "evaluate is 'clients' in a local setting: what one client measures would need noise of its own that is larger than "
            "the number. Use a central mechanism, or measure on public data: test=(inputs, targets)."
        )
    if automatic and kind.is_local:
        raise InputError(
            "local lr is 'auto' in a local setting: clients would have to vote, and one vote drowns in its own noise. Choose the "
            "rate on public data, or in a simulation without privacy, and give it: Sgd(lr=0.1, …)."
        )
    if not kind.is_private or not (automatic or evaluations):
        return votes, None
    adaptive = isinstance(algorithm.clip, AdaptiveClip)

    def beside(mechanism: Mechanism) -> list[Event]:
        measured = [evaluation_of(mechanism, rounds, sampling, evaluations).event(sampling)] * evaluations
        return measured + (
            probe_of(mechanism, rounds, sampling).events(sampling, adaptive=adaptive) if automatic else []
        )

    return votes, beside


def evaluation_interval(rounds: int, every: int | None = None) -> int:
    """After how many rounds the clients measure the model: as given, or such that they do it ten times in a run."""
    return every or max(1, rounds // 10)


def evaluation_count(rounds: int, every: int | None = None) -> int:
    """How often they do it in a run; after the last round in any case."""
    return -(-rounds // evaluation_interval(rounds, every))


def evaluation_of(mechanism: Mechanism, rounds: int, sampling: Sampling, evaluations: int) -> Mechanism:
    """The mechanism of a measurement by clients; all of them together cost `EVALUATION_SHARE` of what the rounds cost."""
    return mechanism.asking(EVALUATION, _noise(mechanism, sampling, EVALUATION_SHARE * rounds / max(evaluations, 1)))


def _noise(mechanism: Mechanism, sampling: Sampling, rounds: float) -> float:
    """The noise of an answer that costs as much as so many rounds, and never more than one: a target may be for each of them."""
    mu = getattr(mechanism.event(sampling), "mu", math.inf)
    return max(1.0 / (mu * math.sqrt(rounds)), 1.0 / mu)


def probe_of(mechanism: Mechanism, rounds: int, sampling: Sampling) -> Probe:
    """The probe of a run by its mechanism: its votes cost `RATE_SHARE` and `CLIP_SHARE` of what the rounds cost together."""
    rate, clip = (_noise(mechanism, sampling, share * rounds) for share in (RATE_SHARE, CLIP_SHARE))
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
    evaluations: int = 0,
) -> tuple[Mechanism, Probe | None, Mechanism | None]:
    """The mechanisms of a run's rounds, of the votes before them where the rate sets itself, and of a measurement by the clients.

    Formal guarantee: all of it together stays within the algorithm's target. The server of a run and every node that finds its
    settings announced get the same three.
    """
    sampling, cohort = participation.sampling(population), participation.expected(population)
    asks, beside = asked(algorithm, local, rounds, sampling, evaluations)
    mechanism = algorithm.bind(dimension, cohort, sampling, rounds, secure, votes=(*asks, *votes), beside=beside)
    measured = evaluation_of(mechanism, rounds, sampling, evaluations) if evaluations else None
    return mechanism, probe_of(mechanism, rounds, sampling) if asks else None, measured
