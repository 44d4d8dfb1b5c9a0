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
from dpfedexp.core.local_rate import CLIP_SHARE, HELPED, RADII, RATE_SHARE, RATES, SCALES, scale_rounds
from dpfedexp.core.sums import HALF, Ask, Secure
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import Mechanism, mechanism_class
from dpfedexp.mechanisms.base import Beside

UPDATE, RATE, CLIP, SCALE, CANDIDATE = "update", "local rate", "first clip", "rate scale", "best candidate"
"""What clients are asked for: an update, one of the votes, or `EVALUATION`; the ledger has these names."""
LATER = (SCALE, CANDIDATE, EVALUATION)
"""Those that come after the first round."""
MOST_CANDIDATES = 8
"""Candidates of a tournament, at most."""
CANDIDATE_SHARE = 0.01
"""What a vote on the best candidate costs, as a share of μ² of the rounds: half a per cent more noise in the updates."""
EVALUATION_SHARE = 0.019
"""What all measurements by clients cost together, as a share of μ² of the rounds: less than 1% more noise in the updates."""


@dataclass(frozen=True)
class Extras:
    """What a run asks of its clients beside updates, in numbers; its noise must pay for all of it.

    Attributes:
        evaluations: measurements of the model.
        rate_votes: how often the local rate and the first clip are voted on, where the rate sets itself: once for every candidate
            that does not take another's.
        scale_votes: how often the rate is rescaled; None for once after each of `scale_rounds`.
        candidate_votes: votes on the best candidate of a tournament.
    """

    evaluations: int = 0
    rate_votes: int = 1
    scale_votes: int | None = None
    candidate_votes: int = 0


@dataclass(frozen=True)
class Probe:
    """The votes that choose the local rate: their mechanisms, and after which rounds the rate is rescaled.

    Formal guarantee: a client is in one bin, whichever it likes, and what it sends is clipped to norm ½. So all the bins together
    move by at most ½ when the client is left out and by at most 1 when it is replaced, and each has noise that is fixed before.
    The event is one Gaussian query (`votes_only`). Without noise nothing is promised.
    """

    rate: Mechanism
    clip: Mechanism
    scale: Mechanism
    rounds: int

    @property
    def scale_rounds(self) -> tuple[int, ...]:
        return scale_rounds(self.rounds)

    def mechanism(self, purpose: str) -> Mechanism:
        return {RATE: self.rate, CLIP: self.clip, SCALE: self.scale}[purpose]

    def events(self, sampling: Sampling, *, adaptive: bool, extras: Extras = Extras()) -> list[Event]:
        """What they cost: the clip is asked for only where it adapts."""
        scales = len(self.scale_rounds) if extras.scale_votes is None else extras.scale_votes
        purposes = [RATE, *([CLIP] if adaptive else [])] * extras.rate_votes + [SCALE] * scales
        return [self.mechanism(purpose).event(sampling) for purpose in purposes]


def in_bins(places: Tensor, bins: int) -> Tensor:
    """What clients send for their places, counted from 1: ½ in that bin; nothing at place 0, for those that abstain, [n, bins]."""
    rows = torch.zeros(len(places), bins + 1, device=places.device)
    rows[torch.arange(len(places), device=places.device), places] = HALF
    return rows[:, 1:]


def bins_of(purpose: str) -> int:
    """How many answers a question has; 0 where an update is asked for."""
    bins = {RATE: len(RATES), CLIP: len(RADII), SCALE: len(SCALES), CANDIDATE: MOST_CANDIDATES, EVALUATION: WIDTH}
    return bins.get(purpose, 0)


def asked(
    algorithm: Algorithm, local: LocalOptimiser | None, rounds: int, sampling: Sampling, extras: Extras = Extras()
) -> tuple[tuple[Ask, ...], Beside | None]:
    """The votes of every round, and what else is released beside the rounds."""
    kind, automatic = mechanism_class(algorithm.mechanism), local is not None and local.automatic
    votes = (HELPED,) if automatic else ()
    evaluations, polls = extras.evaluations, extras.candidate_votes
    if polls and kind.is_local:
        raise InputError(
            "candidates are compared in a local setting: clients would have to vote, and one vote is lost in its own noise. Use a "
            "central mechanism, or compare them on public data."
        )
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
    if not kind.is_private or not (automatic or evaluations or polls):
        return votes, None
    adaptive = isinstance(algorithm.clip, AdaptiveClip)

    def beside(mechanism: Mechanism) -> list[Event]:
        measured = [evaluation_of(mechanism, rounds, sampling, evaluations).event(sampling)] * evaluations
        probe = probe_of(mechanism, rounds, sampling) if automatic else None
        probes = [] if probe is None else probe.events(sampling, adaptive=adaptive, extras=extras)
        return measured + probes + [candidate_vote(mechanism, rounds, sampling).event(sampling)] * polls

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


def candidate_vote(mechanism: Mechanism, rounds: int, sampling: Sampling) -> Mechanism:
    """The mechanism of a vote on the best candidate; it costs `CANDIDATE_SHARE` of what the rounds cost."""
    return mechanism.asking(CANDIDATE, _noise(mechanism, sampling, CANDIDATE_SHARE * rounds))


def _noise(mechanism: Mechanism, sampling: Sampling, rounds: float) -> float:
    """The noise of an answer that costs as much as so many rounds, and never more than one: a target may be for each of them."""
    mu = getattr(mechanism.event(sampling), "mu", math.inf)
    return max(1.0 / (mu * math.sqrt(rounds)), 1.0 / mu)


def probe_of(mechanism: Mechanism, rounds: int, sampling: Sampling) -> Probe:
    """The probe of a run by its mechanism: each vote costs `RATE_SHARE` or `CLIP_SHARE` of what the rounds cost together."""
    rate, clip = (_noise(mechanism, sampling, share * rounds) for share in (RATE_SHARE, CLIP_SHARE))
    return Probe(mechanism.asking(RATE, rate), mechanism.asking(CLIP, clip), mechanism.asking(SCALE, rate), rounds)


def bind(
    algorithm: Algorithm,
    local: LocalOptimiser | None,
    dimension: int,
    population: int,
    participation: Participation,
    rounds: int,
    secure: Secure,
    votes: tuple[Ask, ...] = (),
    extras: Extras = Extras(),
) -> tuple[Mechanism, Probe | None, Mechanism | None]:
    """The mechanisms of a run's rounds, of the votes before them where the rate sets itself, and of a measurement by the clients.

    Formal guarantee: all of it together stays within the algorithm's target. The server of a run and every node that finds its
    settings announced get the same three.
    """
    sampling, cohort = participation.sampling(population), participation.expected(population)
    asks, beside = asked(algorithm, local, rounds, sampling, extras)
    mechanism = algorithm.bind(dimension, cohort, sampling, rounds, secure, votes=(*asks, *votes), beside=beside)
    measured = evaluation_of(mechanism, rounds, sampling, extras.evaluations) if extras.evaluations else None
    return mechanism, probe_of(mechanism, rounds, sampling) if asks else None, measured
