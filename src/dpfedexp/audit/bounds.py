"""From samples of a statistic under two neighbouring inputs to a lower bound on ε that holds with a stated confidence.

If a release is (ε, δ)-DP, every test has true positive rate ≤ e^ε·(false positive rate) + δ. So a test with rates t and f proves
ε ≥ log((t − δ)/f). The threshold of the test is chosen on one half of the samples and its rates are bounded on the other
(Clopper–Pearson), so the choice costs no confidence. The same rates prove μ ≥ Φ⁻¹(t) − Φ⁻¹(f) for a release claimed to be μ-GDP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

Floats = NDArray[np.float64]
Score = Callable[[Floats, Floats], Floats]
_THRESHOLDS = 512


@dataclass(frozen=True)
class LowerBound:
    """What was proven, by a test with these rates: true positives at least `tpr`, false positives at most `fpr`."""

    value: float
    tpr: float
    fpr: float


def rate_at_least(successes: Floats, trials: int, failure: float) -> Floats:
    """Clopper–Pearson: the rate is at least this, but for probability `failure`.

    >>> round(float(rate_at_least(np.array(1.0), 1, 0.05)), 3)
    0.05
    """
    safe = np.maximum(successes, 1)
    return np.where(successes > 0, betaincinv(safe, trials - safe + 1, failure), 0.0)


def rate_at_most(successes: Floats, trials: int, failure: float) -> Floats:
    return 1.0 - rate_at_least(trials - successes, trials, failure)


def epsilon_score(delta: float) -> Score:
    def score(tpr: Floats, fpr: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            return np.maximum(0.0, np.log(np.maximum(tpr - delta, 1e-300)) - np.log(np.maximum(fpr, 1e-300)))

    return score


def mu_score(tpr: Floats, fpr: Floats) -> Floats:
    return np.maximum(0.0, ndtri(np.clip(tpr, 1e-300, 1.0 - 1e-16)) - ndtri(np.clip(fpr, 1e-300, 1.0 - 1e-16)))


def lower_bound(here: Floats, there: Floats, score: Score, confidence: float) -> LowerBound:
    """The best of all threshold tests, in both directions, proven on samples that had no part in choosing it."""
    failure = (1.0 - confidence) / 2.0
    positive, threshold, sign = _choose(here[::2], there[::2], score, failure)
    first, second = (here, there) if positive else (there, here)
    tpr, fpr = _rates(sign * first[1::2], sign * second[1::2], np.array([threshold]), failure)
    return LowerBound(float(score(tpr, fpr)[0]), float(tpr[0]), float(fpr[0]))


def _choose(here: Floats, there: Floats, score: Score, failure: float) -> tuple[bool, float, float]:
    best = (-math.inf, True, 0.0, 1.0)
    pooled = np.concatenate([here, there])
    # Far quantiles too: rare events are where a strong claim is tested.
    tail = np.geomspace(1.0 / len(pooled), 0.5, _THRESHOLDS // 2)
    levels = np.quantile(pooled, np.concatenate([tail, 1.0 - tail]))
    for positive in (True, False):
        first, second = (here, there) if positive else (there, here)
        for sign in (1.0, -1.0):
            values = score(*_rates(sign * first, sign * second, np.sort(sign * levels), failure))
            at = int(np.argmax(values))
            best = max(best, (float(values[at]), positive, float(np.sort(sign * levels)[at]), sign))
    return best[1:]


def _rates(first: Floats, second: Floats, thresholds: Floats, failure: float) -> tuple[Floats, Floats]:
    """At each threshold, the rate of {statistic ≥ threshold}: at least under the first, at most under the second."""
    hits, alarms = (len(x) - np.searchsorted(np.sort(x), thresholds, side="left") for x in (first, second))
    return (
        rate_at_least(hits.astype(np.float64), len(first), failure),
        rate_at_most(alarms.astype(np.float64), len(second), failure),
    )
