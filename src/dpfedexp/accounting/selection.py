"""Private selection: a random number of runs, of which only the best is shown (Papernot and Steinke 2022).

The number of runs is drawn from a geometric distribution and stays secret, as do all runs but the best and their scores. Then
everything together costs about as much as two or three runs, however many there were.
"""

from __future__ import annotations

import math

from dp_accounting.dp_event import GaussianDpEvent, RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant

from dpfedexp.errors import InputError, checked, is_number, require

RENYI = "Rényi divergences of a random number of runs (Papernot and Steinke 2022)"
"""The accountant of a selection."""


@checked
def selection_epsilon(mu: float, delta: float, runs: float) -> float:
    """ε of showing the best of a geometric number of runs.

    Formal guarantee: an upper bound on ε at `delta`, by Rényi differential privacy, of the best of K runs, each μ-GDP, where K is
    geometric with mean `runs`, nothing but the best is ever seen, and its score follows from what the run released and from public
    data. It may be above what one run alone costs at the same δ by another accountant.

    Args:
        mu: of one run: √T·μ of its rounds (`Guarantee.mu`).
        delta: δ.
        runs: the mean number of runs, above 1.
    """
    require(is_number(mu) and 0 < mu < math.inf, f"mu is {mu!r}; it must be a positive number.")
    require(is_number(delta) and 0 < delta < 1, f"delta is {delta!r}; it must be above 0 and below 1.")
    require(is_number(runs) and 1 < runs < math.inf, f"runs is {runs!r}; the mean number of runs must be above 1.")
    accountant = RdpAccountant()
    accountant.compose(RepeatAndSelectDpEvent(GaussianDpEvent(1.0 / mu), mean=runs, shape=1.0))
    epsilon = float(accountant.get_epsilon(delta))
    if not math.isfinite(epsilon):
        raise InputError(f"mu is {mu:g}, which is no privacy that a selection could keep; give the runs more noise.")
    return epsilon


@checked
def number_of_runs(runs: float, uniform: float) -> int:
    """K, geometric on 1, 2, … with mean `runs`.

    Args:
        runs: the mean.
        uniform: a number from [0, 1) that nobody else knows.
    """
    require(is_number(runs) and 1 < runs < math.inf, f"runs is {runs!r}; the mean number of runs must be above 1.")
    return 1 + int(math.log1p(-uniform) / math.log1p(-1.0 / runs))
