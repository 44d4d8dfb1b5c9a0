"""Brent's method in Python beside scipy's in C."""

from __future__ import annotations

import math
import random

import pytest
from scipy.optimize import brentq

from dpfedexp.accounting import gdp
from dpfedexp.accounting.root import find_root

FUNCTIONS = {
    "line": (lambda x: 3.0 * x - 1.0, 0.0, 2.0),
    "cubic with a flat root": (lambda x: (x - 0.3) ** 3, -1.0, 2.0),
    "cosine": (math.cos, 0.0, 3.0),
    "steep": (lambda x: math.tanh(1e6 * (x - 0.123456789)), -1.0, 1.0),
    "steps, where interpolation divides by zero": (lambda x: -1.0 if x < 0.7 else 1.0, 0.0, 1.0),
    "subnormal values": (lambda x: 5e-324 * math.copysign(1.0, x - 0.2), -1.0, 1.0),
    "ends the wrong way round": (lambda x: x * x - 2.0, 2.0, 0.0),
    "root at the left end": (lambda x: x, 0.0, 1.0),
    "root at the right end": (lambda x: x - 1.0, 0.0, 1.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize(("xtol", "rtol"), [(1e-15, 1e-15), (1e-300, 1e-14), (2.5e-10, 1e-14)])
def test_the_root_is_that_of_scipy_to_the_last_bit(name, xtol, rtol):
    function, low, high = FUNCTIONS[name]
    theirs, result = brentq(function, low, high, xtol=xtol, rtol=rtol, full_output=True, disp=False)
    if not result.converged:
        with pytest.raises(RuntimeError, match="100 steps"):
            find_root(function, low, high, xtol=xtol, rtol=rtol)
    else:
        assert find_root(function, low, high, xtol=xtol, rtol=rtol) == theirs


def test_the_gaussian_epsilon_is_the_one_that_scipys_root_gives():
    draw = random.Random(7)
    for _ in range(300):
        mu, delta = 10 ** draw.uniform(-3, 2), 10 ** draw.uniform(-12, -1)
        if delta >= gdp.advantage(mu):
            continue
        low, high = float(gdp.ndtri(delta)) - 1e-9, mu / 2

        def excess(a, mu=mu, delta=delta):
            return gdp._log_delta(a, mu) - math.log(delta)

        a = brentq(excess, low, high, xtol=1e-15, rtol=1e-15)
        assert gdp.epsilon(mu, delta) == max(0.0, mu * (mu / 2 - a)), (mu, delta)


def test_a_function_without_a_change_of_sign_is_refused():
    with pytest.raises(ValueError, match=r"same sign at 1\.0 and at 2\.0"):
        find_root(lambda x: x, 1.0, 2.0, xtol=1e-9, rtol=1e-14)


def test_a_value_that_is_not_a_number_is_refused():
    with pytest.raises(ValueError, match="not a number"):
        find_root(lambda x: math.nan if 0.1 < x < 0.9 else x - 0.5, 0.0, 1.0, xtol=1e-9, rtol=1e-14)
