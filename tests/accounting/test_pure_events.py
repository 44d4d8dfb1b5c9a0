"""Anything that is ε-DP by itself: what it costs alone, in groups and in sequences."""

import json
import math

import pytest

from dpfedexp import InputError
from dpfedexp.accounting import PureEvent, Sampling, compose
from dpfedexp.accounting.events import from_json, to_json
from dpfedexp.accounting.statement import NOT_LEFT_OUT, other_adjacency

CENTRAL, LOCAL = PureEvent(0.1, "central"), PureEvent(0.1, "local")


def test_one_release_costs_its_epsilon_and_many_compose_as_randomised_response_does():
    assert compose([(CENTRAL, 1)], 0.0).epsilon == 0.1
    assert compose([(CENTRAL, 100)], 0.0).epsilon == pytest.approx(10.0, rel=1e-12)
    total = compose([(CENTRAL, 100)], 1e-5)
    # Between the Gaussian limit √(2·100·ln(1/δ))·ε and the plain sum.
    assert 3.0 < total.epsilon < 6.0
    assert total.accountant == "composition of ε-DP releases"
    assert not total.exact


def test_answers_that_a_server_adds_into_one_release_cost_their_sum_at_every_delta():
    charges, earlier = [], []
    for _ in range(20):
        event = CENTRAL.beside(earlier)
        earlier.append(CENTRAL)
        charges.append((event, 1))
    assert compose(charges, 1e-5).epsilon >= 2.0 - 1e-4
    assert LOCAL.beside([LOCAL] * 5) == LOCAL, "reports are randomised one by one"


def test_in_a_cohort_of_fixed_size_one_client_pushes_another_out():
    pushed = PureEvent(0.5, "central", "add-remove", Sampling("fixed", 0.1))
    assert compose([(pushed, 1)], 0.0).epsilon == 1.0
    assert compose([(PureEvent(0.5, "central", "add-remove", Sampling("poisson", 0.1)), 1)], 0.0).epsilon == 0.5


def test_replacing_is_leaving_out_and_taking_in():
    assert PureEvent(0.5, "central", "add-remove").under("replace-one") == PureEvent(1.0, "central")
    with pytest.raises(InputError, match="says nothing about leaving"):
        CENTRAL.under("add-remove")
    assert other_adjacency([(CENTRAL, 3)], 1e-5) == (None, NOT_LEFT_OUT)
    turned, _ = other_adjacency([(PureEvent(0.5, "central", "add-remove"), 1)], 0.0)
    assert turned.epsilon_total == 1.0


def test_a_group_costs_its_size_in_the_centre_and_as_many_reports_locally():
    assert CENTRAL.hosted(4) == (PureEvent(0.4, "central"), 1)
    assert LOCAL.hosted(4) == (LOCAL, 4)


@pytest.mark.parametrize(
    "change",
    [
        {"epsilon": True},
        {"epsilon": -1.0},
        {"epsilon": math.nan},
        {"epsilon": "1"},
        {"setting": "none"},
        {"setting": ["central"]},
        {"adjacency": "other"},
    ],
)
def test_an_event_that_nobody_wrote_is_a_sentence(change):
    with pytest.raises(InputError):
        from_json(json.loads(json.dumps(to_json(CENTRAL) | change)))


def test_an_epsilon_beyond_all_promises_composes_to_a_number():
    large = PureEvent(800.0, "central")
    assert compose([(large, 5000), (PureEvent(0.3, "central"), 7)], 1e-5).epsilon > 1e5
    assert compose([(PureEvent(10**400, "central"), 2)], 1e-5).epsilon > 1e5
