"""Gaussian differential privacy at the ends of its ranges, where formulas do not reach."""

import math

import pytest

from dpfedexp.accounting import gdp


def test_epsilon_at_the_ends():
    assert gdp.epsilon(math.inf, 1.0) == 0.0  # δ = 1 promises nothing, whatever was released
    assert gdp.epsilon(math.inf, 0.999) == math.inf
    assert gdp.epsilon(0.0, 0.0) == 0.0
    assert gdp.epsilon(1.0, 0.0) == math.inf
    assert gdp.epsilon(1.0, gdp.advantage(1.0)) == 0.0
    assert 0.0 < gdp.epsilon(1.0, gdp.advantage(1.0) * (1 - 1e-9)) < 1e-6


def test_delta_at_the_ends():
    assert gdp.delta(0.0, 0.0) == 0.0
    assert gdp.delta(-1.0, 0.0) == pytest.approx(1.0 - math.exp(-1.0), rel=1e-14)
    assert gdp.delta(3.0, math.inf) == 1.0
    assert gdp.delta(math.inf, 3.0) == 0.0
    assert gdp.delta(0.0, 1.0) == pytest.approx(gdp.advantage(1.0), rel=1e-14)


def test_mu_at_the_ends():
    assert gdp.mu(math.inf, 0.1) == math.inf
    assert gdp.mu(1.0, 1.0) == math.inf
    assert gdp.mu(1.0, 0.0) == 0.0
    assert gdp.delta(0.0, gdp.mu(0.0, 0.3)) == pytest.approx(0.3, rel=1e-12)
    for delta in (0.6, 0.5, 1e-5, 1e-200):
        for epsilon in (1e-9, 1e-3, 1.0, 50.0, 1e4):
            found = gdp.mu(epsilon, delta)
            # At ε = 1e-9 and δ = 1e-200 two nearly equal numbers are subtracted, which leaves about 7 digits of log δ.
            assert gdp.log_delta(epsilon, found) == pytest.approx(math.log(delta), rel=1e-6, abs=1e-9)
