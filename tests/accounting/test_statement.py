"""The statement says what was proven, in words, and every number of the text is in the JSON."""

from __future__ import annotations

import json
import math
import re

import pytest
from events_by_hand import central, local
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.accounting import NonPrivateEvent, PrivacyStatement, compose, gdp
from dpfedexp.accounting.privunit import exact_event
from dpfedexp.accounting.statement import membership_advantage, strength

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def statement(charges, delta=1e-5, **context) -> PrivacyStatement:
    return PrivacyStatement.from_charges(charges, delta, **{"algorithm": "CDP-FedEXP", "clients": 1000, **context})


CASES = {
    "central": statement([(central(5.0), 50)]),
    "central, stopped early": statement([(central(5.0), 20)], planned=[(central(5.0), 50)]),
    "add-remove, sampled": statement([(central(1.0, rate=0.1, adjacency="add-remove"), 10)], simulated=False),
    "local": statement([(local(0.7), 50)], algorithm="LDP-FedEXP"),
    "privunit": statement([(exact_event(2.0, 2.0, 2.0), 50)], algorithm="LDP-FedEXP"),
    "one round": statement([(central(50.0), 1)], clients=1),
    "tiny epsilon": statement([(central(900.0), 3)]),
    "not private": statement([(NonPrivateEvent(), 50)], algorithm="FedAvg"),
    "nothing yet": statement([]),
}


@pytest.mark.parametrize("name", CASES)
def test_every_number_of_the_text_is_in_the_json(name):
    case = CASES[name]
    values = json.loads(case.to_json())
    values.pop("text")
    known = set(NUMBER.findall(json.dumps(values)))
    assert set(NUMBER.findall(case.text)) <= known


@pytest.mark.parametrize("name", CASES)
def test_json_reads_back_to_the_same_statement(name):
    assert PrivacyStatement.from_json(CASES[name].to_json()) == CASES[name]
    assert str(CASES[name]) == CASES[name].text
    assert json.loads(CASES[name].to_json())["text"] == CASES[name].text


def test_private_text_names_who_whom_how_much_and_what_is_left_out():
    text = CASES["central"].text
    for words in (
        "Who is protected",
        "Against whom",
        "How much",
        "What is not covered",
        "replace-one",
        "exact Gaussian (GDP)",
    ):
        assert words in text
    assert "epsilon = 1.56" in text
    assert "epsilon = 15.46 at delta = 1e-05" in text
    assert "trusted to add the noise" in text
    assert "by trying several of them" in text
    assert "This is a weak guarantee" in text


def test_local_text_gives_both_figures_and_does_not_trust_the_server():
    for name, one, total in (("local", "15.66", "289.34"), ("privunit", "6.00", "289.68")):
        text = CASES[name].text
        assert f"epsilon = {one}" in text
        assert f"epsilon = {total}" in text
        assert "nobody has to be trusted" in text
        assert "very weak" in text
    assert "With no delta at all the total is epsilon = 300.00" in CASES["privunit"].text


def test_non_private_run_says_so_in_one_sentence():
    text = CASES["not private"].text
    assert "not private" in text
    assert text.count(".") == 1
    assert json.loads(CASES["not private"].to_json())["epsilon_total"] is None


def test_simulation_says_that_its_noise_came_from_a_seed():
    assert "noise came from a seed" in CASES["central"].text
    assert "seed" not in CASES["add-remove, sampled"].text


def test_early_stop_states_spent_and_planned():
    text = CASES["central, stopped early"].text
    assert "all 20 rounds" in text
    assert "The plan is 50 rounds, which would cost epsilon = 15.46" in text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(z=st.floats(0.3, 300), rounds=st.integers(1, 500))
def test_printed_figures_are_never_below_the_proven_ones(z, rounds):
    case = statement([(central(z), rounds)])
    assert float(case.shown["epsilon_total"]) >= case.epsilon_total - 1e-9
    assert float(case.shown["epsilon_round"]) >= case.epsilon_round - 1e-9
    assert float(case.shown["attack_success_percent"]) >= 100 * case.attack_success - 1e-9


def test_advantage_is_exact_for_gaussian_rounds():
    case = CASES["central"]
    assert case.membership_advantage == pytest.approx(gdp.delta(0.0, 0.4 * math.sqrt(50)), rel=1e-12)
    assert case.attack_success == pytest.approx(0.92135, abs=1e-5)


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0, 20.0, 800.0, 1e5])
def test_advantage_of_epsilon_delta_is_the_total_variation_bound(epsilon):
    delta = 1e-5
    from dpfedexp.accounting import Guarantee

    bound = membership_advantage(Guarantee(epsilon, delta, "replace-one", "local", "x"))
    if epsilon < 700:
        assert bound == pytest.approx((math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1), rel=1e-12)
    assert delta <= bound + 1e-18
    assert bound <= 1.0


def test_advantage_covers_the_exact_one_of_privunit():
    from dpfedexp.accounting import privunit

    event = exact_event(0.2, 0.2, 0.1)
    exact = privunit.delta([(event, 5)], 0.0)
    assert membership_advantage(compose([(event, 5)], 1e-5)) >= exact > 0.1


def test_large_epsilon_is_called_weak():
    assert [strength(e) for e in (0.5, 8.0, 15.5, 289.0, math.inf)] == [
        "strong",
        "moderate",
        "weak",
        "very weak",
        "none",
    ]


def test_epsilon_of_one_round_is_the_most_expensive_one():
    case = statement([(central(5.0), 10), (central(2.0), 1)])
    assert case.epsilon_round == compose([(central(2.0), 1)], 1e-5).epsilon
    assert case.rounds == 11
