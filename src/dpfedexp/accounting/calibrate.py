"""From a target ε back to what is needed: noise, rounds, or the ε of one report.

Each inverts `compose`, so it is as tight as the accountant that it inverts, and the answer is always on the safe side
of the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Event
from dpfedexp.errors import InputError, checked, require

_LEAST_NOISE, _MOST_NOISE = 1e-9, 1e12
_MOST_ROUNDS = 2**40
_TOLERANCE = 1e-9


@checked
def calibrate_noise(
    make_event: Callable[[float], Event],
    *,
    target_epsilon: float,
    delta: float,
    rounds: int,
    beside: Callable[[float], Sequence[Event]] | None = None,
) -> float:
    """The smallest noise multiplier z for which the run costs at most `target_epsilon` at `delta`.

    Args:
        make_event: what one round costs with z.
        target_epsilon: what all of it may cost.
        delta: δ of the target.
        rounds: how many rounds there are.
        beside: what else the run releases once, with z; None for nothing.
    """
    _check(target_epsilon, delta, rounds)
    require(delta > 0.0, f"delta is {delta}; Gaussian noise needs a delta above 0.")

    def epsilon(z: float) -> float:
        once = [] if beside is None else [(event, 1) for event in beside(z)]
        return compose([(make_event(z), rounds), *once], delta).epsilon

    low = high = 1.0
    while epsilon(high) > target_epsilon:
        low, high = high, high * 4.0
        if high > _MOST_NOISE:
            raise InputError(
                f"target_epsilon is {target_epsilon:g} over {rounds} rounds at delta {delta:g}; no noise multiplier "
                f"up to {_MOST_NOISE:g} reaches it. Raise target_epsilon, or make sure that the mechanism is private."
            )
    while low == high or epsilon(low) <= target_epsilon:
        low, high = low / 4.0, low
        if low < _LEAST_NOISE:
            raise InputError(
                f"target_epsilon is {target_epsilon:g} over {rounds} rounds at delta {delta:g}; even a noise multiplier "
                f"of {_LEAST_NOISE:g} costs less, so there is nothing to calibrate. Lower target_epsilon."
            )
    return math.exp(_root(lambda x: epsilon(math.exp(x)), target_epsilon, math.log(low), math.log(high)))


@checked
def affordable_rounds(event: Event, target_epsilon: float, delta: float) -> int:
    """The largest number of rounds of `event` that costs at most `target_epsilon` at `delta`.

    0 when one is too many.
    """
    _check(target_epsilon, delta, 1)

    def fits(rounds: int) -> bool:
        return compose([(event, rounds)], delta).epsilon <= target_epsilon

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, high * 2
        if high > _MOST_ROUNDS:
            raise InputError(
                f"target_epsilon is {target_epsilon:g}; more than {low} rounds fit in it, so this mechanism sets no "
                "limit. Lower target_epsilon or the noise."
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


@checked
def calibrate_privunit(
    make_event: Callable[[float], Event], *, target_epsilon: float, delta: float = 0.0, rounds: int = 1
) -> float:
    """The largest ε of one report for which `rounds` reports cost at most `target_epsilon` at `delta`.

    `make_event` makes the mechanism's event from the ε of one report. The default is a target per round (pure ε);
    with `rounds` and `delta` the target is for the total, by the tight composition.
    """
    _check(target_epsilon, delta, rounds)

    def epsilon(one: float) -> float:
        return compose([(make_event(one), rounds)], delta).epsilon

    low = target_epsilon / rounds
    while low > 1e-9 and epsilon(low) > target_epsilon:
        low /= 2.0
    require(
        epsilon(low) <= target_epsilon,
        f"target_epsilon is {target_epsilon:g} over {rounds} rounds; no report is private enough for it. Raise it.",
    )
    high = 1.5 * low
    while epsilon(high) <= target_epsilon:
        low, high = high, 1.5 * high
        require(
            high < 1e6,
            f"target_epsilon is {target_epsilon:g}; no report is too costly for it, so it sets no limit. Lower it.",
        )
    return -_root(lambda x: epsilon(-x), target_epsilon, -high, -low)


def _root(epsilon: Callable[[float], float], target: float, low: float, high: float) -> float:
    """The smallest x in [low, high] with epsilon(x) ≤ target, for a decreasing function, to 1e-9, on the safe side."""
    from scipy.optimize import brentq

    def excess(x: float) -> float:
        return math.log(max(epsilon(x), 1e-300)) - math.log(target)

    x = float(brentq(excess, low, high, xtol=_TOLERANCE / 4.0, rtol=1e-14))
    step = _TOLERANCE / 4.0
    while epsilon(x) > target:
        x, step = min(high, x + step), 2.0 * step
    return x


def _check(target_epsilon: float, delta: float, rounds: int) -> None:
    require(
        target_epsilon > 0.0 and math.isfinite(target_epsilon),
        f"target_epsilon is {target_epsilon}; it must be a finite number above 0.",
    )
    require(0.0 <= delta < 1.0, f"delta is {delta}; it must be at least 0 and below 1.")
    require(rounds >= 1, f"rounds is {rounds}; it must be 1 or more.")
