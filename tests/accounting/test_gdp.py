"""The exact Gaussian curve against 50 digits of mpmath and against dp-accounting."""

from __future__ import annotations

import math
import time

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.accounting import gdp


def delta_50_digits(epsilon: float, mu: float) -> mpmath.mpf:
    """δ(ε) by the textbook formula; erfc keeps its 50 digits in the tail, so the difference keeps more than 40."""
    with mpmath.workdps(50):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        near, far = (e / m - m / 2) / mpmath.sqrt(2), (e / m + m / 2) / mpmath.sqrt(2)
        return (mpmath.erfc(near) - mpmath.exp(e) * mpmath.erfc(far)) / 2


@pytest.mark.parametrize("delta", [1e-12, 1e-9, 1e-5, 1e-2, 0.1])
@pytest.mark.parametrize("epsilon", [1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e4])
def test_mu_agrees_with_50_digits_from_epsilon_1e_minus_3_to_1e4(epsilon, delta):
    mu = gdp.mu(epsilon, delta)
    # δ moves by about (ε/μ)·(1 + |a|) relative per relative change of μ, so 1e-9 in δ is a few 1e-12 in μ at most of the grid.
    relative = abs(delta_50_digits(epsilon, mu) / mpmath.mpf(delta) - 1)
    assert relative < 1e-9


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
@pytest.mark.parametrize("mu", [1e-3, 0.1, 1.0, 2.0 / 0.7, 30.0, 140.0])
def test_epsilon_agrees_with_50_digits(mu, delta):
    epsilon = gdp.epsilon(mu, delta)
    if epsilon == 0.0:
        assert delta_50_digits(0.0, mu) <= delta
    else:
        assert abs(delta_50_digits(epsilon, mu) / mpmath.mpf(delta) - 1) < 1e-9


@pytest.mark.parametrize(("epsilon", "mu"), [(1e4, 100.0), (1e4, 150.0), (1e-3, 2e-4), (700.0, 1.0), (0.5, 3.0)])
def test_log_delta_has_no_overflow_where_delta_is_below_every_float(epsilon, mu):
    exact = float(mpmath.log(delta_50_digits(epsilon, mu)))
    assert gdp.log_delta(epsilon, mu) == pytest.approx(exact, rel=1e-9)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(log_epsilon=st.floats(-3, 4), log_delta=st.floats(-12, -1))
def test_mu_and_epsilon_are_inverse_to_each_other(log_epsilon, log_delta):
    epsilon, delta = 10.0**log_epsilon, 10.0**log_delta
    # At a large δ a small ε moves δ by little, so the inverse is conditioned worse: 1e-9 leaves three digits of slack.
    assert gdp.epsilon(gdp.mu(epsilon, delta), delta) == pytest.approx(epsilon, rel=1e-9, abs=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(mu=st.floats(1e-3, 150), log_delta=st.floats(-12, -1), factor=st.floats(1.001, 10))
def test_epsilon_grows_with_mu_and_falls_with_delta(mu, log_delta, factor):
    delta = 10.0**log_delta
    here = gdp.epsilon(mu, delta)
    assert gdp.epsilon(mu * factor, delta) >= here
    assert gdp.epsilon(mu, delta / factor) >= here
    if here > 0.0:
        assert gdp.epsilon(mu * factor, delta) > here
        assert gdp.epsilon(mu, delta / factor) > here


def test_edges_are_zero_and_infinite():
    assert gdp.epsilon(0.0, 1e-5) == 0.0
    assert gdp.epsilon(math.inf, 1e-5) == math.inf
    assert gdp.epsilon(1.0, 0.0) == math.inf
    assert gdp.delta(1.0, 0.0) == 0.0
    assert gdp.delta(1.0, math.inf) == 1.0
    assert gdp.mu(math.inf, 1e-5) == math.inf
    assert gdp.mu(1.0, 0.0) == 0.0


def test_mu_squared_adds():
    assert gdp.compose([3.0, 4.0]) == 5.0
    assert gdp.compose([]) == 0.0


def test_advantage_is_delta_at_epsilon_zero():
    for mu in (1e-3, 0.5, 2.8, 9.0):
        assert gdp.advantage(mu) == pytest.approx(gdp.delta(0.0, mu), rel=1e-12)


def test_epsilon_takes_microseconds():
    start = time.process_time()
    for i in range(1000):
        gdp.epsilon(2.0 + i / 1000, 1e-5)
    # About 20 µs each on one idle core; 500 µs still rules out any quadrature or grid.
    assert (time.process_time() - start) / 1000 < 500e-6


def test_200_random_settings_agree_with_dp_accounting_pld_to_1e_minus_3():
    random = np.random.default_rng(0)
    for _ in range(200):
        z, rounds, delta = (
            10 ** random.uniform(-0.3, 1.5),
            int(10 ** random.uniform(0, 3)),
            10 ** random.uniform(-9, -2),
        )
        mu = math.sqrt(rounds) / z
        # One Gaussian of the composed μ, on a grid of 2000 points per standard deviation: pessimistic, so never below.
        pld = privacy_loss_distribution.from_gaussian_mechanism(1 / mu, value_discretization_interval=mu / 500)
        theirs, ours = pld.get_epsilon_for_delta(delta), gdp.epsilon(mu, delta)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)
        assert ours <= theirs * (1 + 1e-9) + 1e-12


def test_rdp_is_never_below_the_exact_curve():
    random = np.random.default_rng(1)
    orders = 1.0 + np.logspace(-2, 3, 120)
    for _ in range(100):
        z, rounds, delta = (
            10 ** random.uniform(-0.5, 1.5),
            int(10 ** random.uniform(0, 3)),
            10 ** random.uniform(-10, -2),
        )
        accountant = rdp_privacy_accountant.RdpAccountant(orders)
        accountant.compose(dp_accounting.GaussianDpEvent(z), rounds)
        exact = gdp.epsilon(math.sqrt(rounds) / z, delta)
        assert accountant.get_epsilon(delta) >= exact * (1 - 1e-12)
        closed_form = np.min(orders * rounds / (2 * z * z) + math.log(1 / delta) / (orders - 1))
        assert closed_form >= exact
