"""What an attack would prove if a claim were exactly tight: the figure that a measured bound is held against.

The law of the statistic is then known, so the rates of every threshold test are; rounding them to whole numbers of samples and
bounding them like measured ones gives the bound to expect.
"""

from __future__ import annotations

import numpy as np
from scipy.special import ndtr
from scipy.stats import binom

from dpfedexp.audit.bounds import Floats, Score, rate_at_least, rate_at_most


def expected_bound(tpr: Floats, fpr: Floats, samples: tuple[int, int], score: Score, confidence: float) -> float:
    """The best bound of tests with these rates, on the half of the samples that proves."""
    first, second = (max(1, n // 2) for n in samples)
    failure = (1.0 - confidence) / 2.0
    low = rate_at_least(np.floor(tpr * first), first, failure)
    high = rate_at_most(np.ceil(fpr * second), second, failure)
    return float(np.max(score(low, high), initial=0.0))


def expected_gaussian(mu: float, samples: tuple[int, int], score: Score, confidence: float) -> float:
    """Of a mean shift of μ noise deviations."""
    return expected_sampled(mu, 1.0, 1, samples, score, confidence)


def expected_sampled(
    mu: float, rate: float, rounds: int, samples: tuple[int, int], score: Score, confidence: float
) -> float:
    """Of the mean over some rounds of a client who is drawn for each at `rate` and then shifts it by ±μ/2.

    The law is a mixture over how often the client was drawn.
    """
    drawn = np.arange(rounds + 1)
    weights = binom.pmf(drawn, rounds, rate)[:, None]
    spread = np.sqrt(rounds)
    thresholds = np.linspace(-8.0 - mu * spread, 8.0 + mu * spread, 4001)[None, :]
    shift = drawn[:, None] * mu / 2 / spread
    here, there = ((weights * ndtr(sign * shift - thresholds)).sum(0) for sign in (1.0, -1.0))
    return expected_bound(here, there, samples, score, confidence)
