"""Lower bounds on ε from samples of a statistic under two neighboring inputs, the power of attacks, and limits of chance.

If a release is (ε, δ)-DP, every test has true positive rate ≤ e^ε·(false positive rate) + δ. So a test with rates t and f proves
ε ≥ log((t − δ)/f). The threshold of the test is chosen on one half of the samples and its rates are bounded on the other
(Clopper–Pearson), so the choice costs no confidence. The same rates prove μ ≥ Φ⁻¹(t) − Φ⁻¹(f) for a release claimed to be μ-GDP.

The power of an attack is the bound that it would prove if the claim were exactly tight. The law of the statistic is then known, and
so are the rates of every threshold test; rounded to whole numbers of samples and bounded like measured rates they give the power.
"""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.special import betaincinv, ndtr, ndtri
from scipy.stats import binom, kstest

from dpfedexp.errors import checked
from dpfedexp.files import finite

Floats = NDArray[np.float64]
Score = Callable[[Floats, Floats], Floats]


def rate_at_least(successes: Floats, trials: int, failure: float) -> Floats:
    """Clopper–Pearson: a lower bound on the rate, which is wrong with probability at most `failure`."""
    safe = np.maximum(successes, 1)
    return np.where(successes > 0, betaincinv(safe, trials - safe + 1, failure), 0.0)


def rate_at_most(successes: Floats, trials: int, failure: float) -> Floats:
    return 1.0 - rate_at_least(trials - successes, trials, failure)


def interval(successes: float, trials: int, failure: float) -> tuple[float, float]:
    """Clopper–Pearson: lower and upper bound on the rate, which are wrong with probability at most `failure`."""
    count = np.array(successes)
    return float(rate_at_least(count, trials, failure / 2)), float(rate_at_most(count, trials, failure / 2))


def epsilon_score(delta: float) -> Score:
    def score(tpr: Floats, fpr: Floats) -> Floats:
        scores: Floats = np.maximum(0.0, np.log(np.maximum(tpr - delta, 1e-300)) - np.log(np.maximum(fpr, 1e-300)))
        return scores

    return score


def mu_score(tpr: Floats, fpr: Floats) -> Floats:
    hit, alarm = (ndtri(np.clip(rate, 1e-300, 1.0 - 1e-16)) for rate in (tpr, fpr))
    scores: Floats = np.maximum(0.0, hit - alarm)
    return scores


@checked
def lower_bound(here: Floats, there: Floats, score: Score, confidence: float) -> float:
    """Compute the lower bound on ε or μ that samples of a statistic under two neighboring inputs prove.

    It is the best of all tests {statistic ≥ threshold} or {statistic ≤ threshold} for either input against the other: the test is
    chosen on one half of the samples, its bound is proven on the other.
    """
    failure = (1.0 - confidence) / 2.0
    tests = []
    for first, second in ((here, there), (there, here), (-here, -there), (-there, -here)):
        pooled = np.concatenate([first[::2], second[::2]])
        # Far quantiles too: a test of a large ε needs rare events.
        tail = np.geomspace(1.0 / len(pooled), 0.5, 64)
        thresholds = np.quantile(pooled, np.concatenate([tail, 1.0 - tail]))
        scores = score(*_rates(first[::2], second[::2], thresholds, failure))
        tests.append((float(scores.max()), thresholds[[int(np.argmax(scores))]], first, second))
    _, threshold, first, second = max(tests, key=lambda test: test[0])
    tpr, fpr = _rates(first[1::2], second[1::2], threshold, failure)
    return float(score(tpr, fpr)[0])


def _rates(first: Floats, second: Floats, thresholds: Floats, failure: float) -> tuple[Floats, Floats]:
    """The rates of {statistic ≥ threshold}: a lower bound under the first input, an upper bound under the second."""
    hits, alarms = (len(x) - np.searchsorted(np.sort(x), thresholds, side="left") for x in (first, second))
    return (
        rate_at_least(hits.astype(np.float64), len(first), failure),
        rate_at_most(alarms.astype(np.float64), len(second), failure),
    )


@dataclass(frozen=True)
class Power:
    """The bounds that an attack proves against a tight claim: the expected bound, and one that is reached almost surely."""

    expected: float
    minimum: float


Outcome = Literal["holds", "BROKEN", "NO POWER", "not audited"]


@checked
@dataclass(frozen=True)
class Result:
    """The result of an attack: the measured bound, the claim that it must not exceed, and the power of the attack.

    Args:
        lower: the measured value: a proven lower bound on ε or μ, or the size of an effect that should not exist.
        claim: the limit of `lower`: the accountant's figure, or the largest effect that chance explains.
        unit: the unit of `lower` and `claim`: "ε at δ = 0.01", "μ", "largest correlation".
        power: what the attack would have proven at this sample size if the claim were exactly tight, as two bounds: the
            expected one, and one that is reached almost surely. None if `detects` is used instead.
        detects: for an effect that should not exist: the smallest effect that would have been noticed, in words.
        one_sided: whether the attack is known in advance to reach little, so that a small bound is no failure.
        skipped: why nothing was measured; empty if something was.
        detail: what was done, in a few words.
    """

    kind: str
    name: str
    unit: str
    lower: float
    claim: float
    confidence: float
    detail: str = ""
    power: Power | None = None
    detects: str = ""
    one_sided: bool = False
    skipped: str = ""

    @property
    def outcome(self) -> Outcome:
        """The verdict. Claims that are exact get a relative tolerance of 1e-9; a result without stated power has no power."""
        if self.skipped:
            return "not audited"
        if not self.lower <= self.claim * (1.0 + 1e-9):
            return "BROKEN"
        if self.power is None:
            return "holds" if self.detects else "NO POWER"
        return "holds" if self.one_sided or self.lower >= self.power.minimum > 0 else "NO POWER"

    @property
    def fails(self) -> bool:
        """Whether this result makes the whole audit fail."""
        return self.outcome in ("BROKEN", "NO POWER")

    @property
    def holds(self) -> bool:
        return self.outcome == "holds"

    @property
    def power_text(self) -> str:
        """The power of the attack, or the effect that it would have detected, as text."""
        if self.skipped:
            return ""
        if self.power is None:
            return self.detects
        return f"{self.power.expected:.4f}" + (" (one-sided)" if self.one_sided else f", ≥ {self.power.minimum:.4f}")

    def to_json(self) -> dict[str, Any]:
        """The result as a JSON object; infinite and NaN values are null."""
        found: dict[str, Any] = finite(
            asdict(self) | {"outcome": self.outcome, "holds": self.holds, "power_text": self.power_text}
        )
        return found


def skip(kind: str, name: str, why: str) -> Result:
    return Result(kind, name, "", 0.0, 0.0, 1.0, why, skipped=why)


_UNLUCKY = 1e-9
"""The probability that the counts of a test are worse than those behind `Power.minimum`."""

_CHOICE = 0.6
"""The share of the best test's bound that remains if the threshold was chosen on few samples."""


def power_of_tests(tpr: Floats, fpr: Floats, samples: tuple[int, int], score: Score, confidence: float) -> Power:
    """The power of the best of tests with these rates, on the half of the samples that proves the bound."""
    first, second = (max(1, n // 2) for n in samples)
    failure = (1.0 - confidence) / 2.0

    def best(hits: Floats, alarms: Floats) -> float:
        bounds = score(rate_at_least(hits, first, failure), rate_at_most(alarms, second, failure))
        return float(np.max(bounds, initial=0.0))

    usual = best(np.floor(tpr * first), np.ceil(fpr * second))
    unlucky = best(binom.ppf(_UNLUCKY, first, tpr), binom.isf(_UNLUCKY, second, fpr))
    return Power(usual, _CHOICE * unlucky)


def power_of_shift(
    mu: float, samples: tuple[int, int], score: Score, confidence: float, rate: float = 1.0, rounds: int = 1
) -> Power:
    """The power of an attack on one client, whose statistic is the mean of a normal variable over the rounds.

    The client is drawn in each round with probability `rate`, and then shifts the round's variable by μ/2 or by −μ/2. So the law
    of the statistic is a mixture over how often the client was drawn.
    """
    drawn = np.arange(rounds + 1)
    weights = binom.pmf(drawn, rounds, rate)[:, None]
    spread = np.sqrt(rounds)
    thresholds = np.linspace(-6.0 - mu * spread, 6.0 + mu * spread, 601)[None, :]
    shift = drawn[:, None] * mu / 2 / spread
    here, there = ((weights * ndtr(sign * shift - thresholds)).sum(0) for sign in (1.0, -1.0))
    return power_of_tests(here, there, samples, score, confidence)


def chance_failure(confidence: float) -> float:
    """The failure probability of a limit of chance: a hundredth of a bound's, because such limits are tight and there are many."""
    return (1.0 - confidence) / 100.0


def largest_correlation(rows: Floats) -> float:
    """The largest |correlation| of two rows, one of them rotated by any number of places; a row against itself only if rotated."""
    centered = rows - rows.mean(1, keepdims=True)
    norms = np.linalg.norm(centered, axis=1, keepdims=True)
    if not bool((norms > 0).all()):
        return 1.0
    spectra = np.fft.rfft(centered / norms, axis=1)
    largest = 0.0
    for n, spectrum in enumerate(spectra):
        found = np.abs(np.fft.irfft(spectra[n:].conj() * spectrum, n=rows.shape[1], axis=1))
        found[0, 0] = 0.0
        largest = max(largest, float(found.max()))
    return min(1.0, largest)


def correlation_limit(rows: int, length: int, failure: float) -> float:
    """The limit that `largest_correlation` of independent normal rows exceeds with probability at most `failure`."""
    # One correlation exceeds t with probability at most (1 − t²)^(n/2): for two rows this is the tail of a point on a sphere, for a
    # row against its rotation it is Chernoff's bound, whose eigenvalues are the cosines. Removing the mean costs one dimension.
    tests = rows * (rows + 1) / 2 * length
    return math.sqrt(-math.expm1(2.0 * math.log(failure / (2.0 * tests)) / (length - 3)))


def distance_limit(samples: int, failure: float) -> float:
    """The limit of `distance` for samples of the true law (Dvoretzky, Kiefer, Wolfowitz; Massart's constant)."""
    return math.sqrt(math.log(2.0 / failure) / (2.0 * samples))


def distance(uniforms: Floats) -> float:
    """The largest distance of the samples' empirical distribution function from that of the uniform law."""
    return float(kstest(uniforms, "uniform", method="asymp").statistic)
