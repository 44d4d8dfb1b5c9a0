"""The event of PrivUnit from its three ε: what was asked for is stated as it was, and the ends of the ranges are inside."""

import math

import pytest

from dpfedexp.accounting.calibrate import calibrate_privunit
from dpfedexp.accounting.privunit import exact_event
from dpfedexp.errors import InputError


def test_the_nominal_epsilon_is_the_sum_of_the_three():
    event = exact_event(1.0, 2.0, 4.0)
    assert event.nominal == 7.0
    assert event.direction_epsilon == pytest.approx(3.0, rel=1e-12)
    assert event.k == math.ceil(math.exp(4.0 / 3.0))


@pytest.mark.parametrize("place", range(3))
def test_each_epsilon_may_be_500_and_neither_0_nor_more(place):
    given = [1.0, 1.0, 1.0]
    assert exact_event(*given[:place], 500.0, *given[place + 1 :]).nominal == 502.0
    for wrong in (0.0, 500.5):
        with pytest.raises(InputError, match=f"epsilon{place}"):
            exact_event(*given[:place], wrong, *given[place + 1 :])


def test_a_target_below_every_report_is_refused():
    with pytest.raises(InputError, match="no report is private enough"):
        calibrate_privunit(lambda one: exact_event(1.0, 1.0, 1.0), target_epsilon=0.5)
