"""What an attack would prove if a claim were exactly tight: the figure that a measured bound is held against.

The law of the statistic is then known, so the rates of every threshold test are; rounding them to whole numbers of samples and
bounding them like measured ones gives the bound to expect.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from dpfedexp.audit.bounds import Floats, Score, rate_at_least, rate_at_most

_UNLUCKY = 1e-9
"""How often the counts of a test are worse than those that `Power.least` rests on."""

_CHOICE = 0.6
"""What is left of the best test's bound where the threshold was chosen on few samples."""


@dataclass(frozen=True)
class Power:
    """What an attack proves if the claim is tight: as a rule, and the least of it but for bad luck."""

    expected: float
    least: float


def power_of_tests(tpr: Floats, fpr: Floats, samples: tuple[int, int], score: Score, confidence: float) -> Power:
    """Of the best of tests with these rates, on the half of the samples that proves."""
    first, second = (max(1, n // 2) for n in samples)
    failure = (1.0 - confidence) / 2.0

    def best(hits: Floats, alarms: Floats) -> float:
        bounds = score(rate_at_least(hits, first, failure), rate_at_most(alarms, second, failure))
        return float(np.max(bounds, initial=0.0))

    usual = best(np.floor(tpr * first), np.ceil(fpr * second))
    unlucky = best(binom.ppf(_UNLUCKY, first, tpr), binom.isf(_UNLUCKY, second, fpr))
    return Power(usual, _CHOICE * unlucky)


def power_of_shift(mu: float, samples: tuple[int, int], score: Score, confidence: float) -> Power:
    """Of a mean shift of μ noise deviations."""
    return power_of_sampling(mu, 1.0, 1, samples, score, confidence)


def power_of_sampling(
    mu: float, rate: float, rounds: int, samples: tuple[int, int], score: Score, confidence: float
) -> Power:
    """Of the mean over some rounds of a client who is drawn for each at `rate` and then shifts it by ±μ/2.

    The law is a mixture over how often the client was drawn.
    """
    drawn = np.arange(rounds + 1)
    weights = binom.pmf(drawn, rounds, rate)[:, None]
    spread = np.sqrt(rounds)
    thresholds = np.linspace(-6.0 - mu * spread, 6.0 + mu * spread, 601)[None, :]
    shift = drawn[:, None] * mu / 2 / spread
    here, there = ((weights * ndtr(sign * shift - thresholds)).sum(0) for sign in (1.0, -1.0))
    return power_of_tests(here, there, samples, score, confidence)
