"""Means over seeds, and whether one algorithm beats another when both are run on the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest, ttest_rel

from reproduction.paper.published import LAST_ROUNDS


def average_of_last_rounds(history: Sequence[dict[str, Any]], metric: str, rounds: int = LAST_ROUNDS) -> float | None:
    """The metric of a run averaged over its last rounds; None if the run diverged."""
    values = [record[metric] for record in history[-rounds:] if metric in record]
    return None if any(value is None for value in values) else statistics.fmean(values)


def final(result: dict[str, Any], metric: str) -> float:
    """The metric averaged over the last rounds of a finished run; infinite if the run diverged."""
    value = result["finals"][metric]
    return math.inf if value is None else value


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    sd: float
    n: int

    def show(self, digits: int = 2) -> str:
        if not math.isfinite(self.mean):
            return "diverged"
        return f"{self.mean:.{digits}f} ({self.sd:.{digits}f})" if self.n > 1 else f"{self.mean:.{digits}f}"


def spread(values: Sequence[float]) -> Spread:
    finite = all(math.isfinite(value) for value in values)
    sd = statistics.stdev(values) if len(values) > 1 and finite else 0.0
    return Spread(statistics.fmean(values), sd, len(values))


@dataclass(frozen=True)
class Paired:
    """Gains of one algorithm over another, seed by seed; p values are one-sided, for "it gains nothing".

    With 5 seeds the exact sign test can't go below 1/32; the t test can, and assumes that the gains are about normal.
    """

    gain: float
    wins: int
    n: int
    p_t: float | None
    p_sign: float | None

    def show(self, digits: int = 2) -> str:
        named = ((self.p_t, "t"), (self.p_sign, "sign"))
        tests = ", ".join(f"{p:.2g} ({name})" for p, name in named if p is not None)
        return f"{self.gain:+.{digits}f}, {self.wins} of {self.n} seeds" + (f", p = {tests}" if tests else "")


def paired(ours: Sequence[float], theirs: Sequence[float], *, larger_is_better: bool) -> Paired:
    """Are ours better than theirs on the same seeds?"""
    sign = 1.0 if larger_is_better else -1.0
    gains = [sign * (a - b) for a, b in zip(ours, theirs, strict=True)]
    wins = sum(gain > 0 for gain in gains)
    if len(gains) < 2 or not all(map(math.isfinite, gains)):
        return Paired(statistics.fmean(gains), wins, len(gains), None, None)
    p_sign = float(binomtest(wins, len(gains), alternative="greater").pvalue)
    # Gains that are all the same leave no spread for a t test to judge by.
    constant = statistics.stdev(gains) <= 1e-9 * max(map(abs, gains))
    p_t = (
        None
        if constant
        else float(ttest_rel(ours, theirs, alternative="greater" if larger_is_better else "less").pvalue)
    )
    return Paired(statistics.fmean(gains), wins, len(gains), p_t, p_sign)


def note_on_tests(seeds: int) -> str:
    """What the p values are, and what so few seeds can show."""
    if seeds < 2:
        return "One seed: no test."
    return (
        f"Paired over n = {seeds} seeds, one-sided: t test, and exact sign test, which can't go below {0.5**seeds:.2g} "
        "with so few seeds."
    )
