"""The exact Gaussian curve against mpmath and dp-accounting, and the joint shift of two queries against brute force."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.accounting import gdp, joint_mu
from dpfedexp.accounting.gdp import FREE_THRESHOLD
from dpfedexp.errors import InputError


def delta_50_digits(epsilon: float, mu: float) -> mpmath.mpf:
    """δ(ε) by the textbook formula; erfc keeps its 50 digits in the tail, so the difference keeps more than 40."""
    with mpmath.workdps(50):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(mu)
        near, far = (e / m - m / 2) / mpmath.sqrt(2), (e / m + m / 2) / mpmath.sqrt(2)
        return (mpmath.erfc(near) - mpmath.exp(e) * mpmath.erfc(far)) / 2


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
    assert gdp._log_delta(mu / 2 - epsilon / mu, mu) == pytest.approx(exact, rel=1e-9)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(log_epsilon=st.floats(-3, 4), a=st.floats(-7, 0.5))
def test_epsilon_and_delta_are_inverse_to_each_other(log_epsilon, a):
    epsilon = 10.0**log_epsilon
    # The μ with μ/2 − ε/μ = a, in the form that does not cancel.
    root = math.sqrt(a * a + 2.0 * epsilon)
    mu = a + root if a > 0.0 else 2.0 * epsilon / (root - a)
    # At a large δ a small ε moves δ by little, so the inverse is conditioned worse: 1e-9 leaves three digits of slack.
    assert gdp.epsilon(mu, gdp.delta(epsilon, mu)) == pytest.approx(epsilon, rel=1e-9, abs=1e-12)


def test_the_curve_at_its_ends():
    assert gdp.epsilon(math.inf, 1.0) == 0.0  # δ = 1 promises nothing, whatever was released
    assert {gdp.epsilon(math.inf, 0.999), gdp.epsilon(1.0, 0.0)} == {math.inf}
    assert {gdp.epsilon(0.0, 0.0), gdp.epsilon(1.0, gdp.advantage(1.0)), gdp.delta(0.0, 0.0)} == {0.0}
    assert 0.0 < gdp.epsilon(1.0, gdp.advantage(1.0) * (1 - 1e-9)) < 1e-6
    assert gdp.delta(-1.0, 0.0) == pytest.approx(1.0 - math.exp(-1.0), rel=1e-14)
    assert (gdp.delta(3.0, math.inf), gdp.delta(math.inf, 3.0)) == (1.0, 0.0)
    for mu in (1e-3, 0.5, 1.0, 9.0):
        assert gdp.advantage(mu) == pytest.approx(gdp.delta(0.0, mu), rel=1e-12)
    assert (gdp.compose([3.0, 4.0]), gdp.compose([])) == (5.0, 0.0)
    assert (joint_mu(1.0, 5.0, math.inf), joint_mu(0.0, 1.0, 1.0)) == (0.4, 0.0)
    assert joint_mu(1.0, 0.0, 1.0) == joint_mu(1.0, 1.0, 0.0) == math.inf
    with pytest.raises(InputError, match="scalar_noise is -1"):
        joint_mu(1.0, 1.0, -1.0)


def brute_force(clip: float, vector_noise: float, scalar_noise: float) -> float:
    """The largest joint shift over a grid of norms and angles of the two updates."""
    norms = np.linspace(0, clip, 401)
    a, b, cosine = np.meshgrid(norms, norms, np.linspace(-1, 1, 9), indexing="ij")
    vector = (a * a + b * b - 2 * a * b * cosine) / vector_noise**2
    return math.sqrt(float((vector + (a * a - b * b) ** 2 / scalar_noise**2).max()))


@pytest.mark.parametrize("rho", [0.01, 1.0, 2.0, 2.5, 2.77, 2.78, 3.0, 5.0, 40.0, 1e4])
def test_closed_form_is_the_supremum_over_pairs_of_clients(rho):
    clip, vector_noise = 0.3, 1.5
    scalar_noise = clip * vector_noise / math.sqrt(rho)
    exact = joint_mu(clip, vector_noise, scalar_noise)
    grid = brute_force(clip, vector_noise, scalar_noise)
    assert grid <= exact * (1 + 1e-12)
    # Near a maximum the shift is quadratic in the norms, so a grid of 400 steps is within 1e-4.
    assert grid == pytest.approx(exact, rel=1e-4)


def test_scalar_is_free_up_to_the_threshold_and_not_above():
    clip, vector_noise = 2.0, 3.0
    for factor, free in ((1 - 1e-9, True), (1 + 1e-6, False)):
        scalar_noise = clip * vector_noise / math.sqrt(FREE_THRESHOLD * factor)
        alone = 2 * clip / vector_noise
        joint = joint_mu(clip, vector_noise, scalar_noise)
        assert (joint == alone) is free
        assert joint == pytest.approx(alone, rel=1e-6)


@pytest.mark.parametrize(
    ("d", "joint", "separate"), [(5046, 15.456, 15.460), (500, 15.456, 15.851), (100, 18.192, 24.382)]
)
def test_paper_settings_cost_what_the_notes_say(d, joint, separate):
    scalar_noise = d * 25 / 1000
    rounds, delta = math.sqrt(50), 1e-5
    assert gdp.epsilon(rounds * joint_mu(1.0, 5.0, scalar_noise), delta) == pytest.approx(joint, abs=5e-4)
    assert gdp.epsilon(rounds * math.hypot(0.4, 1 / scalar_noise), delta) == pytest.approx(separate, abs=5e-4)
