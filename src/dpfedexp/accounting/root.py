"""A root of a continuous function between two ends, by Brent's method.

It takes the same steps as `scipy.optimize.brentq`, so that it gives the same number to the last bit; a test compares the two.
Importing scipy's optimisers would take as long as everything else that the Gaussian's closed form needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

_MOST_STEPS = 100


def find_root(function: Callable[[float], float], low: float, high: float, *, xtol: float, rtol: float) -> float:
    """An x between `low` and `high` that is at most xtol + rtol·|x| from a root of the function.

    Raises:
        ValueError: the function has the same sign at both ends, or is not a number somewhere between them.
        RuntimeError: 100 steps were not enough.
    """
    before, x, opposite = low, high, 0.0
    f_before, f_x, f_opposite = _value(function, before), _value(function, x), 0.0
    if f_before == 0.0:
        return before
    if f_x == 0.0:
        return x
    if (f_before < 0.0) == (f_x < 0.0):
        raise ValueError(f"the function has the same sign at {low} and at {high}")
    last_step = step = 0.0
    for _ in range(_MOST_STEPS):
        if f_before != 0.0 and (f_before < 0.0) != (f_x < 0.0):
            # The root is between the last two points.
            opposite, f_opposite = before, f_before
            last_step = step = x - before
        if abs(f_opposite) < abs(f_x):
            before, x, opposite = x, opposite, x
            f_before, f_x, f_opposite = f_x, f_opposite, f_x
        enough = (xtol + rtol * abs(x)) / 2.0
        half = (opposite - x) / 2.0
        if f_x == 0.0 or abs(half) < enough:
            return x
        attempt = math.inf
        if abs(last_step) > enough and abs(f_x) < abs(f_before):
            attempt = _interpolate((before, f_before), (x, f_x), (opposite, f_opposite))
        if 2.0 * abs(attempt) < min(abs(last_step), 3.0 * abs(half) - enough):
            last_step, step = step, attempt
        else:
            last_step = step = half
        before, f_before = x, f_x
        if abs(step) > enough:
            x += step
        else:
            x += enough if half > 0.0 else -enough
        f_x = _value(function, x)
    raise RuntimeError(f"no root between {low} and {high} was found in {_MOST_STEPS} steps")


def _interpolate(before: tuple[float, float], at: tuple[float, float], opposite: tuple[float, float]) -> float:
    """The step from `at` to the root of the line, or of the inverse parabola, through the points; infinite where there is none."""
    (x0, f0), (x1, f1), (x2, f2) = before, at, opposite
    try:
        if x0 == x2:
            return -f1 * (x1 - x0) / (f1 - f0)
        slope0, slope2 = (f0 - f1) / (x0 - x1), (f2 - f1) / (x2 - x1)
        return -f1 * (f2 * slope2 - f0 * slope0) / (slope2 * slope0 * (f2 - f0))
    except ZeroDivisionError:
        return math.inf


def _value(function: Callable[[float], float], x: float) -> float:
    value = float(function(x))
    if math.isnan(value):
        raise ValueError(f"the function is not a number at {x}")
    return value
