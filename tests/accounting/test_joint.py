"""The joint sensitivity of vector and scalar: closed form against brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpfedexp.accounting import gdp, joint_mu
from dpfedexp.accounting.gdp import FREE_THRESHOLD
from dpfedexp.errors import InputError


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


def test_joint_lies_between_the_vector_alone_and_separate_composition():
    for d in (10, 50, 100, 121, 500):
        scalar_noise = d * 25 / 1000
        joint = joint_mu(1.0, 5.0, scalar_noise)
        assert 0.4 <= joint < math.hypot(0.4, 1 / scalar_noise)


@pytest.mark.parametrize(
    ("d", "joint", "separate"), [(5046, 15.456, 15.460), (500, 15.456, 15.851), (100, 18.192, 24.382)]
)
def test_paper_settings_cost_what_the_notes_say(d, joint, separate):
    scalar_noise = d * 25 / 1000
    rounds, delta = math.sqrt(50), 1e-5
    assert gdp.epsilon(rounds * joint_mu(1.0, 5.0, scalar_noise), delta) == pytest.approx(joint, abs=5e-4)
    assert gdp.epsilon(rounds * math.hypot(0.4, 1 / scalar_noise), delta) == pytest.approx(separate, abs=5e-4)


def test_papers_release_is_free_from_d_121_at_1000_clients():
    assert joint_mu(1.0, 5.0, 121 * 25 / 1000) == 0.4
    assert joint_mu(1.0, 5.0, 120 * 25 / 1000) > 0.4


def test_edges():
    assert joint_mu(1.0, 5.0, math.inf) == 0.4
    assert joint_mu(1.0, 0.0, 1.0) == math.inf
    assert joint_mu(1.0, 1.0, 0.0) == math.inf
    assert joint_mu(0.0, 1.0, 1.0) == 0.0
    with pytest.raises(InputError, match="scalar_noise is -1"):
        joint_mu(1.0, 1.0, -1.0)
