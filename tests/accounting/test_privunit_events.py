"""The event of PrivUnit from its three ε: what was asked for is stated as it was, and the ends of the ranges are inside."""

import math

import pytest

from dpfedexp.accounting import compose
from dpfedexp.accounting.calibrate import calibrate_privunit
from dpfedexp.accounting.charges import privunit as exact_event
from dpfedexp.accounting.events import PrivUnitEvent, Sampling
from dpfedexp.accounting.privunit import PURE, epsilon
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import PrivUnit
from dpfedexp.mechanisms.privunit import ScalarDP


def test_the_nominal_epsilon_is_the_sum_of_the_three():
    event = exact_event(1.0, 2.0, 4.0)
    assert event.nominal == 7.0
    assert event.direction_epsilon == pytest.approx(3.0, rel=1e-12)
    assert event.k == math.ceil(math.exp(4.0 / 3.0))


@pytest.mark.parametrize("levels", range(2, 60))
def test_an_epsilon2_that_asks_for_a_whole_number_of_levels_gets_it_here_and_in_the_mechanism(levels):
    """e^{ε₂/3} is then that number up to rounding, which must not add a level to one of the two."""
    epsilon2 = 3.0 * math.log(levels)
    assert exact_event(1.0, 1.0, epsilon2).k == ScalarDP(epsilon2, 1.0).k == levels


def test_the_event_of_the_exact_gamma_is_the_mechanisms_own():
    assert exact_event(1.0, 2.0, 4.0) == PrivUnit(0.3, 50, 1.0, 2.0, 4.0).event(Sampling())
    assert exact_event(1.0, 2.0, 4.0).exact


def test_reports_that_say_nothing_cost_nothing():
    silent = PrivUnitEvent(p=0.5, cap=0.5, epsilon2=0.0, k=1, nominal=0.0)
    assert epsilon([(silent, 5)], 1e-5) == (0.0, PURE)
    assert epsilon([(silent, 5), (exact_event(0.4, 0.3, 0.3), 1)], 0.1)[0] < 1.0 - 1e-3, (
        "δ buys something at a sum of 1"
    )


@pytest.mark.parametrize("place", range(3))
def test_each_epsilon_may_be_500_and_neither_0_nor_more(place):
    given = [1.0, 1.0, 1.0]
    assert exact_event(*given[:place], 500.0, *given[place + 1 :]).nominal == 502.0
    for wrong in (0.0, 500.5):
        with pytest.raises(InputError, match=f"epsilon{place}"):
            exact_event(*given[:place], wrong, *given[place + 1 :])


def test_a_target_above_every_report_is_refused():
    with pytest.raises(InputError, match="sets no limit"):
        calibrate_privunit(lambda one: exact_event(0.1, 0.1, 0.1), target_epsilon=5.0)


@pytest.mark.parametrize(("p", "cap"), [(1.0, 0.3), (0.9, 0.0)])
def test_a_direction_that_is_never_or_always_in_its_cap_is_not_private(p, cap):
    assert PrivUnitEvent(p, cap, epsilon2=1.0, k=2, nominal=3.0).epsilon == math.inf


def test_the_pure_sum_is_exact_and_so_is_nothing_at_all():
    assert compose([(exact_event(1.0, 1.0, 1.0), 5)], 0.0).exact
    assert not compose([(exact_event(1.0, 1.0, 1.0), 10**6)], 1e-5).exact, "a bound by RDP"
    assert compose([], 1e-5).exact


def test_a_target_below_every_report_is_refused():
    with pytest.raises(InputError, match="no report is private enough"):
        calibrate_privunit(lambda one: exact_event(1.0, 1.0, 1.0), target_epsilon=0.5)


def test_a_delta_that_covers_every_loss_leaves_no_epsilon():
    assert epsilon([(exact_event(0.01, 0.01, 0.01), 1)], 0.5)[0] == 0.0


def test_full_participation_has_no_other_rate_than_one():
    assert Sampling("full", 1.0) == Sampling()
    with pytest.raises(InputError, match=r"rate is 0\.5 with full participation"):
        Sampling("full", 0.5)
