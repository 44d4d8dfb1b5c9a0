"""What an outsider sees of a whole run, and what it proves: every client is a canary in a coordinate of its own.

A client's update is +C or −C along its coordinate in every round, because its target is out of reach. So each coordinate of each
round is one sample of "this client's data or their replacement", the attacker knows everything else, and a few dozen rounds of
a cheap linear model are thousands of samples through all the code of a run: sampling, clipping, noise, step, release.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtr
from scipy.stats import chi2

from dpfedexp.accounting import Event, Guarantee, compose
from dpfedexp.algorithms import Algorithm
from dpfedexp.audit.bounds import Floats, Score, epsilon_score, lower_bound, mu_score, rate_at_least, rate_at_most
from dpfedexp.audit.correlation import correlation_limit, largest_correlation, rare
from dpfedexp.audit.power import power_of_sampling
from dpfedexp.audit.result import Result
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.errors import InputError

KIND = "black box"
DELTA = 0.01
BLOCK = 4
"""Rounds that are attacked together, against what is claimed for their composition."""


@dataclass(frozen=True)
class Observed:
    """`sums` [rounds, clients]: the model's move in a client's coordinate, in units of the clip on the sum; `signs` [clients]."""

    name: str
    sums: Floats
    signs: Floats
    event: Event
    noise: float

    @property
    def rate(self) -> float:
        """How often a client is said to take part."""
        return 1.0 if self.event.sampling is None else self.event.sampling.rate


def clip_and_noise(algorithm: Algorithm) -> tuple[float, float]:
    """The radius and the noise multiplier of every round; raises `InputError` where the clip adapts or no multiplier is given."""
    if isinstance(algorithm.clip, AdaptiveClip):
        raise InputError(f"clip of {algorithm.name} adapts; this audit needs a fixed radius, so give a number.")
    if algorithm.noise_multiplier is None:
        raise InputError(
            f"noise_multiplier of {algorithm.name} is missing; this audit needs it rather than a target_epsilon."
        )
    return algorithm.clip, algorithm.noise_multiplier


def mu_of(guarantee: Guarantee, name: str) -> float:
    """The μ of a guarantee; raises `InputError` where the mechanism has none."""
    if guarantee.mu is None:
        raise InputError(
            f"the guarantee of {name} has no μ; this audit needs Gaussian noise and every client in every round."
        )
    return guarantee.mu


def bounds(seen: Observed, confidence: float) -> list[Result]:
    """What one round proves about a client, and what some rounds together do."""
    # μ needs fewer samples, but sampling has none.
    unit, score = ("μ", mu_score) if seen.rate == 1.0 else (f"ε at δ = {DELTA:g}", epsilon_score(DELTA))
    return [_bound(seen, rounds, unit, score, confidence) for rounds in (1, BLOCK)]


def _bound(seen: Observed, rounds: int, unit: str, score: Score, confidence: float) -> Result:
    usable = len(seen.sums) // rounds * rounds
    blocks = seen.sums[:usable].reshape(-1, rounds, len(seen.signs)).mean(1)
    here, there = blocks[:, seen.signs > 0].ravel(), blocks[:, seen.signs < 0].ravel()
    guarantee = compose([(seen.event, rounds)], DELTA)
    claim = mu_of(guarantee, seen.name) if unit == "μ" else guarantee.epsilon
    counts = (len(here), len(there))
    return Result(
        KIND,
        seen.name + (f", {rounds} rounds together" if rounds > 1 else ", one round"),
        unit,
        lower_bound(here, there, score, confidence).value,
        claim,
        confidence,
        f"{len(here) + len(there)} samples from {len(seen.sums)} rounds",
        power=power_of_sampling(2.0 / seen.noise, seen.rate, rounds, counts, score, confidence),
    )


def repetition(runs: list[Observed], name: str, confidence: float) -> Result:
    """Whether noise comes again: in another coordinate, another round or another run. Everybody takes part in these runs."""
    rows = np.concatenate([run.sums - run.signs for run in runs])
    limit = correlation_limit(len(rows), rows.shape[1], rare(confidence))
    detail = f"{len(rows)} rounds of {len(runs)} runs, {rows.shape[1]} coordinates"
    unit = "largest correlation of noise"
    value = largest_correlation(rows)
    sees = f"≥ {min(1.0, 2 * limit):.2f}"
    return Result(KIND, f"{name}, noise again", unit, value, limit, 1 - rare(confidence), detail, sees=sees)


def participation(seen: Observed, confidence: float) -> list[Result]:
    """Who took part, from a run with so little noise that it shows: how often, and whether independently."""
    failure = rare(confidence)
    bits = seen.sums * seen.signs > 0.5
    # Noise turns a few bits over, by a known probability.
    slip = float(ndtr(-0.5 / seen.noise))
    rate = seen.rate * (1 - slip) + (1 - seen.rate) * slip
    count, total = np.array(float(bits.sum())), bits.size
    low, high = (float(f(count, total, failure / 2)) for f in (rate_at_least, rate_at_most))
    detail = f"{bits.shape[0]} rounds of {bits.shape[1]} clients"
    made: dict[str, Any] = {"kind": KIND, "confidence": 1 - failure, "detail": detail}
    found = [
        Result(
            name=f"{seen.name}, who takes part",
            unit="rate off the one charged",
            lower=max(0.0, low - rate, rate - high),
            claim=0.0,
            sees=f"≥ {high - low:.3f}",
            **made,
        )
    ]
    for axis, who in ((1, "clients"), (0, "rounds")):
        groups = bits.sum(axis)
        spread = float(np.square(groups - rate * bits.shape[axis]).sum() / (bits.shape[axis] * rate * (1 - rate)))
        # Counts of many coins are a little less spread than χ² in the tails, never more.
        ends = chi2.ppf([failure / 2, 1 - failure / 2], len(groups)) / len(groups)
        limit = float(max(-np.log(ends[0]), np.log(ends[1])))
        found.append(
            Result(
                name=f"{seen.name}, {who} drawn on their own",
                unit="|log| of the counts' dispersion",
                lower=float(abs(np.log(max(spread / len(groups), 1e-300)))),
                claim=limit,
                sees=f"≥ {2 * limit:.2f}",
                **made,
            )
        )
    return found
