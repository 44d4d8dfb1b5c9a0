"""Requests to clients other than updates: votes on the local rate and the first clip, and private evaluation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpfedexp.accounting import Event, Sampling
from dpfedexp.algorithms.algorithm import Algorithm
from dpfedexp.algorithms.round import Participation
from dpfedexp.core.client_metrics import EVALUATION, WIDTH
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.local_rate import CLIP_SHARE, IMPROVED, RADII, RATE_SHARE, RATES, SCALES, scale_rounds
from dpfedexp.core.sums import MAX_SHARE, Secure, VoteSpec
from dpfedexp.errors import require
from dpfedexp.mechanisms import Mechanism, mechanism_class
from dpfedexp.mechanisms.base import OneTimeEvents

UPDATE, RATE, CLIP, SCALE, CANDIDATE = "update", "local rate", "first clip", "rate scale", "best candidate"
"""The names of requests to clients, as in the ledger: an update or one of the votes. `EVALUATION` is another one."""
LATER = (SCALE, CANDIDATE, EVALUATION)
"""The requests that come after the first round."""
MOST_CANDIDATES = 8
"""The largest number of candidates of a tournament."""
BINS = {RATE: len(RATES), CLIP: len(RADII), SCALE: len(SCALES), CANDIDATE: MOST_CANDIDATES, EVALUATION: WIDTH}
"""The number of bins of each vote."""
CANDIDATE_SHARE = 0.01
"""The cost of a vote on the best candidate, as a share of μ² of the rounds: half a percent more noise in the updates."""
EVALUATION_SHARE = 0.019
"""The cost of all evaluations by clients together, as a share of μ² of the rounds: less than 1% more noise in the updates."""


@dataclass(frozen=True)
class Extras:
    """The number of requests of a run beside updates; the calibration of the noise covers all of them.

    Attributes:
        evaluations: number of evaluations by clients.
        rate_votes: number of votes on an automatic local rate and the first clip: one for every candidate that does not use the
            rate of another candidate.
        scale_votes: number of votes that rescale the rate; None for one after each of `scale_rounds`, as with large noise.
        candidate_votes: number of votes on the best candidate of a tournament.
    """

    evaluations: int = 0
    rate_votes: int = 1
    scale_votes: int | None = None
    candidate_votes: int = 0


@dataclass(frozen=True)
class Probe:
    """The votes that choose the local rate: their mechanisms by purpose, and after which rounds the rate is rescaled.

    `noise_share` is the norm of a round's noise over the clip; infinite until it is known, so that the most votes are counted.

    Formal guarantee of each vote: a client's answer is one bin, clipped to norm ½. So all bins together change by at most ½ in
    norm when a client is left out and by at most 1 when it is replaced, and each bin has noise of a fixed size.
    Each vote is one Gaussian query with a charge of its own (`votes_only`). Without noise there is no guarantee.
    """

    mechanisms: Mapping[str, Mechanism]
    rounds: int
    noise_share: float = math.inf

    @property
    def scale_rounds(self) -> tuple[int, ...]:
        return scale_rounds(self.rounds, self.noise_share)

    def events(self, sampling: Sampling, *, adaptive: bool, extras: Extras = Extras()) -> list[Event]:
        """Return the events of all votes; the first clip is voted on only if the clip is adaptive."""
        scales = len(self.scale_rounds) if extras.scale_votes is None else extras.scale_votes
        purposes = [RATE, *([CLIP] if adaptive else [])] * extras.rate_votes + [SCALE] * scales
        return [self.mechanisms[purpose].event(sampling) for purpose in purposes]


def bin_answers(places: Tensor, bins: int) -> Tensor:
    """Return the answers as rows [n, bins]: ½ in the chosen bin, counted from 1; zeros for bin 0 (abstention)."""
    rows = torch.zeros(len(places), bins + 1, device=places.device)
    rows[torch.arange(len(places), device=places.device), places] = MAX_SHARE
    return rows[:, 1:]


def extra_releases(
    algorithm: Algorithm, local: LocalOptimizer | None, rounds: int, sampling: Sampling, extras: Extras = Extras()
) -> tuple[tuple[VoteSpec, ...], OneTimeEvents | None]:
    """Return the votes of every round, and a function that lists the events released once (None if there are none)."""
    kind, automatic = mechanism_class(algorithm.mechanism), local is not None and local.automatic
    votes = (IMPROVED,) if automatic else ()
    evaluations, polls = extras.evaluations, extras.candidate_votes
    asked = {"candidates are compared": polls, "evaluate is 'clients'": evaluations, "local lr is 'auto'": automatic}
    for what, wanted in asked.items():
        require(
            not (wanted and kind.is_local),
            f"{what} in a local setting: the noise on one client's answer would be larger than the answer. Use a central "
            "mechanism; or measure on public data, and set a rate such as lr = 0.1.",
        )
    if not kind.is_private or not (automatic or evaluations or polls):
        return votes, None
    adaptive = isinstance(algorithm.clip, AdaptiveClip)

    def one_time(mechanism: Mechanism) -> list[Event]:
        measured = [evaluation_mechanism(mechanism, rounds, sampling, evaluations).event(sampling)] * evaluations
        probe = make_probe(mechanism, rounds, sampling) if automatic else None
        probes = [] if probe is None else probe.events(sampling, adaptive=adaptive, extras=extras)
        return measured + probes + [candidate_vote(mechanism, rounds, sampling).event(sampling)] * polls

    return votes, one_time


def evaluation_interval(rounds: int, every: int | None = None) -> int:
    """Return the number of rounds between evaluations by clients: `every`, or by default ten evaluations in a run."""
    return every or max(1, rounds // 10)


def evaluation_count(rounds: int, every: int | None = None) -> int:
    """Return the number of evaluations by clients in a run; the last round always has one."""
    return -(-rounds // evaluation_interval(rounds, every))


def evaluation_mechanism(mechanism: Mechanism, rounds: int, sampling: Sampling, evaluations: int) -> Mechanism:
    """Return the mechanism of one evaluation by clients; all of them together cost `EVALUATION_SHARE` of the μ² of all rounds."""
    return mechanism.asking(EVALUATION, _noise(mechanism, sampling, EVALUATION_SHARE * rounds / max(evaluations, 1)))


def candidate_vote(mechanism: Mechanism, rounds: int, sampling: Sampling) -> Mechanism:
    """Return the mechanism of a vote on the best candidate, which costs `CANDIDATE_SHARE` of the μ² of all rounds."""
    return mechanism.asking(CANDIDATE, _noise(mechanism, sampling, CANDIDATE_SHARE * rounds))


def _noise(mechanism: Mechanism, sampling: Sampling, rounds: float) -> float:
    """Return the noise of a request that costs as much as `rounds` rounds, and at most as much as one round."""
    mu = getattr(mechanism.event(sampling), "mu", math.inf)
    return max(1.0 / (mu * math.sqrt(rounds)), 1.0 / mu)


def make_probe(mechanism: Mechanism, rounds: int, sampling: Sampling) -> Probe:
    """Make the probe of a run; a vote on the rate costs `RATE_SHARE`, one on the clip `CLIP_SHARE` of the μ² of all rounds."""
    rate, clip = (_noise(mechanism, sampling, share * rounds) for share in (RATE_SHARE, CLIP_SHARE))
    noises = {RATE: rate, CLIP: clip, SCALE: rate}
    return Probe({purpose: mechanism.asking(purpose, noise) for purpose, noise in noises.items()}, rounds)


def with_scale_votes(
    extras: Extras,
    algorithm: Algorithm,
    local: LocalOptimizer | None,
    dimension: int,
    cohort: float,
    sampling: Sampling,
    rounds: int,
    secure: Secure,
) -> Extras:
    """Return the extras with the number of votes on the scale of the rate, which depends on the noise of the run.

    The noise is computed for the largest number of votes. Fewer votes need less noise, so noise that counts as small stays small.
    """
    votes, one_time = extra_releases(algorithm, local, rounds, sampling, extras)
    if not votes or extras.scale_votes is not None:
        return extras
    mechanism = algorithm.bind(dimension, cohort, sampling, rounds, secure, votes=votes, one_time=one_time)
    return replace(extras, scale_votes=len(scale_rounds(rounds, mechanism.noise_share(dimension, cohort) or 0.0)))


def bind(
    algorithm: Algorithm,
    local: LocalOptimizer | None,
    dimension: int,
    population: int,
    participation: Participation,
    rounds: int,
    secure: Secure,
    extras: Extras = Extras(),
) -> tuple[Mechanism, Probe | None, dict[str, Mechanism]]:
    """Build the mechanisms of a run: of its rounds, of the votes on an automatic rate, and of other requests by purpose.

    Formal guarantee: all of them together stay within the target of the algorithm. The server and every node that receives its
    settings build the same mechanisms.
    """
    sampling, cohort = participation.sampling(population), participation.expected(population)
    extras = with_scale_votes(extras, algorithm, local, dimension, cohort, sampling, rounds, secure)
    asks, one_time = extra_releases(algorithm, local, rounds, sampling, extras)
    mechanism = algorithm.bind(dimension, cohort, sampling, rounds, secure, votes=asks, one_time=one_time)
    known = (mechanism, rounds, sampling)
    others = {EVALUATION: evaluation_mechanism(*known, extras.evaluations)} if extras.evaluations else {}
    others |= {CANDIDATE: candidate_vote(*known)} if extras.candidate_votes else {}
    if not asks:
        return mechanism, None, others
    noise_share = mechanism.noise_share(dimension, cohort) or 0.0
    return mechanism, replace(make_probe(*known), noise_share=noise_share), others
