"""From samples of a statistic under two neighbouring inputs to a lower bound on ε that holds with a stated confidence.

If a release is (ε, δ)-DP, every test has true positive rate ≤ e^ε·(false positive rate) + δ. So a test with rates t and f proves
ε ≥ log((t − δ)/f). The threshold of the test is chosen on one half of the samples and its rates are bounded on the other
(Clopper–Pearson), so the choice costs no confidence. The same rates prove μ ≥ Φ⁻¹(t) − Φ⁻¹(f) for a release claimed to be μ-GDP.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtri

from dpfedexp.errors import checked

Floats = NDArray[np.float64]
Score = Callable[[Floats, Floats], Floats]
_THRESHOLDS = 128


@checked
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
            scores: Floats = np.maximum(0.0, np.log(np.maximum(tpr - delta, 1e-300)) - np.log(np.maximum(fpr, 1e-300)))
        return scores

    return score


def mu_score(tpr: Floats, fpr: Floats) -> Floats:
    scores: Floats = np.maximum(
        0.0, ndtri(np.clip(tpr, 1e-300, 1.0 - 1e-16)) - ndtri(np.clip(fpr, 1e-300, 1.0 - 1e-16))
    )
    return scores


@dataclass(frozen=True)
class ThresholdTests:
    """Tests {statistic ≥ threshold} for the first of two laws against the second: one half chooses, the other proves."""

    thresholds: Floats
    chosen: tuple[Floats, Floats]
    first: Floats
    second: Floats
    failure: float

    @staticmethod
    def of(first: Floats, second: Floats, failure: float) -> ThresholdTests:
        pooled = np.concatenate([first[::2], second[::2]])
        # Far quantiles too: rare events are where a strong claim is tested.
        tail = np.geomspace(1.0 / len(pooled), 0.5, _THRESHOLDS // 2)
        thresholds = np.quantile(pooled, np.concatenate([tail, 1.0 - tail]))
        rates = _rates(np.sort(first[::2]), np.sort(second[::2]), thresholds, failure)
        return ThresholdTests(thresholds, rates, np.sort(first[1::2]), np.sort(second[1::2]), failure)

    def choose(self, score: Score) -> tuple[float, float]:
        """How good the best of them looked, and its threshold."""
        values = score(*self.chosen)
        best = int(np.argmax(values))
        return float(values[best]), float(self.thresholds[best])

    def prove(self, score: Score, threshold: float) -> LowerBound:
        tpr, fpr = _rates(self.first, self.second, np.array([threshold]), self.failure)
        return LowerBound(float(score(tpr, fpr)[0]), float(tpr[0]), float(fpr[0]))


class Distinguisher:
    """The best of all threshold tests between two laws, in all directions, proven on samples that had no part in choosing it."""

    def __init__(self, here: Floats, there: Floats, confidence: float) -> None:
        failure = (1.0 - confidence) / 2.0
        pairs = ((here, there), (there, here), (-here, -there), (-there, -here))
        self.tests = [ThresholdTests.of(first, second, failure) for first, second in pairs]

    def bound(self, score: Score) -> LowerBound:
        best = max(self.tests, key=lambda tests: tests.choose(score)[0])
        return best.prove(score, best.choose(score)[1])


@checked
def lower_bound(here: Floats, there: Floats, score: Score, confidence: float) -> LowerBound:
    """What samples of a statistic under two neighbouring inputs prove."""
    return Distinguisher(here, there, confidence).bound(score)


def _rates(first: Floats, second: Floats, thresholds: Floats, failure: float) -> tuple[Floats, Floats]:
    """Of sorted samples, the rate of {statistic ≥ threshold}: at least under the first, at most under the second."""
    hits, alarms = (len(x) - np.searchsorted(x, thresholds, side="left") for x in (first, second))
    return (
        rate_at_least(hits.astype(np.float64), len(first), failure),
        rate_at_most(alarms.astype(np.float64), len(second), failure),
    )
