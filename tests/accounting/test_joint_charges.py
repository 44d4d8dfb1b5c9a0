"""Where the joint discount of two queries holds, what stands beside it, and how mixed rounds compose."""

import math

import pytest
from events_by_hand import central

from dpfedexp.accounting import Sampling, compose, gdp
from dpfedexp.accounting.gdp import joint_mu
from dpfedexp.core.votes import within_clip
from dpfedexp.mechanisms import CentralGaussian

Z, SCALAR, COUNT = 5.0, 2.0, 3.0
PAPER = CentralGaussian(0.3, Z, numerator="paper", scalar_multiplier=SCALAR)
SEPARATE = math.hypot(2.0 / Z, 1.0 / SCALAR)


def test_the_joint_discount_is_there_for_full_rounds_under_replace_one():
    event = PAPER.event(Sampling())
    assert event.joint_mu == joint_mu(1.0, Z, SCALAR)
    assert event.mu < SEPARATE - 0.01


@pytest.mark.parametrize("sampling", [Sampling("poisson", 0.3), Sampling("fixed", 0.3)], ids=str)
def test_a_sampled_round_has_no_joint_discount(sampling):
    """One side of a sampled pair is a round without the client, so the two worst cases no longer exclude each other."""
    event = PAPER.event(sampling)
    assert event.joint_mu is None
    assert event.mu == pytest.approx(SEPARATE, rel=1e-14)
    assert event.radius == pytest.approx(math.hypot(1.0 / Z, 1.0 / SCALAR), rel=1e-14)


def test_under_add_remove_there_is_nothing_to_discount():
    event = CentralGaussian(0.3, Z, "add-remove", "paper", SCALAR).event(Sampling())
    assert event.mu == pytest.approx(math.hypot(1.0 / Z, 1.0 / SCALAR), rel=1e-14)
    assert event.mu == pytest.approx(event.separate_mu, rel=1e-14)


def test_the_count_is_charged_beside_the_joint_shift():
    """A bit moves from −½ to ½ whatever the vector does, so its shift of 1 comes on top."""
    event = CentralGaussian(0.3, Z, "replace-one", "paper", SCALAR, (within_clip(COUNT),)).event(Sampling())
    assert event.mu == pytest.approx(math.hypot(joint_mu(1.0, Z, SCALAR), 1.0 / COUNT), rel=1e-14)
    assert [query.name for query in event.queries] == ["update", "squared norms", "within clip"]


@pytest.mark.parametrize("order", [1, -1])
def test_full_rounds_beside_fixed_cohorts_under_add_remove_leave_the_price_of_those_pushed_out(order):
    """A full round moves by r, a fixed cohort by 2r: 3 and 5 of them make √(3 + 5·4)·r, and not √8·r."""
    full = central(Z, adjacency="add-remove")
    fixed = central(Z, rate=0.1, kind="fixed", adjacency="add-remove")
    both = compose([(full, 3), (fixed, 5)][::order], 1e-5)
    assert both.epsilon == pytest.approx(gdp.epsilon(math.sqrt(3 + 5 * 4) / Z, 1e-5), rel=1e-9)
    assert both.epsilon > 1.3 * gdp.epsilon(math.sqrt(8) / Z, 1e-5)
