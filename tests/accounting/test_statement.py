"""The statement says what was proven, in words, and every number of the text is in the JSON."""

import json
import math
import re

import pytest
from events_by_hand import central, local
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.accounting import Guarantee, NonPrivateEvent, PrivacyStatement, PrivUnitEvent, Sampling, compose, gdp
from dpfedexp.accounting.events import central_gaussian, votes_only
from dpfedexp.accounting.events import privunit as exact_event
from dpfedexp.accounting.statement import card, membership_advantage, strength, wrap
from dpfedexp.errors import InputError

NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def statement(charges, delta=1e-5, **context) -> PrivacyStatement:
    return PrivacyStatement.from_charges(charges, delta, **{"algorithm": "CDP-FedEXP", "clients": 1000, **context})


PAPERS_GAMMA = PrivUnitEvent(
    p=1 / (1 + math.exp(-2.0)), cap=0.170045, epsilon2=2.0, k=2, nominal=6.0, sampling=Sampling(), attained=True
)
"""The cap of the paper's γ at ε₁ = 2: its direction spends 3.585 of 4."""

CASES = {
    "central": statement([(central(5.0), 50)]),
    "central, stopped early": statement([(central(5.0), 20)], planned=[(central(5.0), 50)]),
    "add-remove, sampled": statement([(central(1.0, rate=0.1, adjacency="add-remove"), 10)], simulated=False),
    "local": statement([(local(0.7), 50)], algorithm="LDP-FedEXP"),
    "privunit": statement([(exact_event(2.0, 2.0, 2.0), 50)], algorithm="LDP-FedEXP"),
    "privunit, paper's gamma": statement([(PAPERS_GAMMA, 50)], algorithm="LDP-FedEXP"),
    "add-remove, fixed size": statement([(central(5.0, rate=0.1, kind="fixed", adjacency="add-remove"), 50)]),
    "large delta": statement([(central(5.0), 50)], clients=40, delta=0.05),
    "local, few report": statement([(local(0.7), 50)], reporting=800),
    "one round": statement([(central(50.0), 1)], clients=1),
    "tiny epsilon": statement([(central(900.0), 3)]),
    "not private": statement([(NonPrivateEvent(), 50)], algorithm="FedAvg"),
    "nothing yet": statement([]),
    "larger deployment": statement([(central(5.0), 50)], noise_cohort=1000, stand_ins=50.0),
}


@pytest.mark.parametrize("name", CASES)
def test_text_and_json_say_the_same(name):
    """Every number of the text is in the JSON, which reads back to the same statement; tables fit 80 columns."""
    case = CASES[name]
    values = json.loads(case.to_json())
    assert values.pop("text") == case.text == str(case)
    assert set(NUMBER.findall(case.text)) <= set(NUMBER.findall(json.dumps(values)))
    assert PrivacyStatement.from_json(case.to_json()) == case
    assert ("takes another one's place" in case.text) is (name == "add-remove, fixed size")
    if case.private and case.rounds:
        assert ("is exactly epsilon" in case.text) is case.exact
        assert ("is at most epsilon" in case.text) is not case.exact
    for width in (80, 120):
        wrapped = wrap(case.text, width)
        assert max(map(len, wrapped.splitlines())) <= width
        assert wrapped.split() == case.text.split()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"choices": ["the clip\n\nThe total is epsilon = 0.01."]}, "more than one line"),
        *(({"version": v}, f"its version is {v}, and this library reads version 2") for v in (1, 3, None)),
    ],
)
def test_a_statement_of_another_version_or_with_a_choice_that_would_add_a_paragraph_is_refused(change, words):
    with pytest.raises(InputError, match=words):
        PrivacyStatement.from_json(json.dumps(json.loads(CASES["central"].to_json()) | change))


def test_the_figures_of_an_unfinished_run_are_for_its_charges_and_those_of_a_stopped_run_for_the_plan():
    charged, planned = [(central(5.0), 20)], [(central(5.0), 50)]
    assert statement(charged, planned=planned).epsilon_total == compose(charged, 1e-5).epsilon
    assert statement(charged, planned=planned, stopping="hand").epsilon_total == compose(planned, 1e-5).epsilon


def test_private_text_names_who_whom_how_much_and_what_is_left_out():
    text = CASES["central"].text
    for words in ("Who is protected", "Against whom", "How much", "What is not covered", "exact Gaussian (GDP)"):
        assert words in text
    assert "One round alone has epsilon = 1.5550." in text
    assert "is exactly epsilon = 15.4562 at delta = 1e-05" in text
    assert "trusted to add the noise" in text
    assert "by trying several of them" in text
    assert "This is a weak guarantee" in text
    assert "noise came from a seed" in text
    assert "seed" not in CASES["add-remove, sampled"].text
    assert CASES["central, stopped early"].epsilon_total == compose([(central(5.0), 20)], 1e-5).epsilon
    stopped = CASES["central, stopped early"].text
    assert "all 20 rounds" in stopped
    assert "The plan is 50 rounds, which would cost epsilon = 15.4562" in stopped
    assert "not private" in CASES["not private"].text
    assert CASES["not private"].text.count(".") == 1
    assert json.loads(CASES["not private"].to_json())["epsilon_total"] is None


def test_a_statement_names_every_vote_and_says_that_the_figures_cover_them():
    votes = (("within clip", 40.0), ("mean loss", 50.0))
    charges = [(central_gaussian(5.0, votes=votes), 50), (votes_only((("loss fell", 60.0),)), 1)]
    said = statement(charges)
    assert said.votes == ("within clip", "mean loss", "loss fell")
    assert 'noisy mean: "within clip", "mean loss", "loss fell". Each has noise of its own' in said.text
    assert PrivacyStatement.from_json(said.to_json()) == said
    assert "noisy mean" not in CASES["central"].text


def test_text_shows_both_adjacencies_side_by_side_whichever_was_charged():
    """15.456 under replace-one is 6.573 under add-remove: the same noise, the same figures, either way round."""
    swapped = statement([(central(5.0, adjacency="add-remove"), 50)])
    for case in (CASES["central"], swapped):
        table = [line for line in case.text.splitlines() if line.startswith("  ") and " exact" in line]
        assert [line.split()[0] for line in table] == [case.adjacency, case.other_adjacency.adjacency]
        assert re.search(r"replace-one.* 1\.5550 +15\.4562 +exact", case.text)
        assert re.search(r"add-remove.* 0\.7256 +6\.5730 +exact", case.text)
        assert "A client that is left out contributes zero" in case.text


def test_local_text_shows_both_readers_and_what_the_second_figure_rests_on():
    case = CASES["local"]
    assert re.search(r"against the server +15\.6582 +289\.3387 +exact", case.text)
    assert re.search(r"against readers of the models +0\.3051 +2\.6242 +exact", case.text)
    assert "at least 1000 clients in every round add their noise as promised and keep it to themselves" in case.text
    assert "There is no add-remove figure" in case.text
    assert "no one has to be trusted" in case.text
    assert "very weak" in case.text
    assert "With no delta at all the total is epsilon = 300.0000" in CASES["privunit"].text
    few = CASES["local, few report"]
    assert few.models_only.epsilon_total > case.models_only.epsilon_total
    assert not few.models_only.exact
    assert "at least 800 clients in every round" in few.text


def test_nominal_and_exact_epsilon_of_privunit_are_explained_where_they_differ():
    case = CASES["privunit, paper's gamma"]
    assert case.epsilon_round == pytest.approx(5.586, abs=1e-3)
    assert case.nominal_epsilon_round == 6.0
    assert "asked for epsilon = 6.0000 a round" in case.text
    assert "Nominal" not in CASES["privunit"].text


@pytest.mark.parametrize(("delta", "clients", "large"), [(1e-3, 1000, True), (9.9e-4, 1000, False), (0.5, 0, False)])
def test_a_delta_of_one_in_the_clients_or_more_is_called_large(delta, clients, large):
    case = statement([(central(5.0), 50)], delta=delta, clients=clients)
    assert case.large_delta is large
    assert ("a delta this large allows" in case.text) is large


@settings(max_examples=100, deadline=None, derandomize=True)
@given(z=st.floats(0.3, 300), rounds=st.integers(1, 500))
def test_printed_figures_are_never_below_the_proven_ones(z, rounds):
    case = statement([(central(z), rounds)])
    assert float(case.shown["epsilon_total"]) >= case.epsilon_total - 1e-9
    assert float(case.shown["epsilon_round"]) >= case.epsilon_round - 1e-9
    percent = float(case.shown["attack_success_percent"])
    assert percent >= 100 * case.attack_success - 1e-9
    assert percent < 100 or case.attack_success > 1 - 1e-7, "certainty is printed only where it is certain"


def test_a_statement_is_of_the_dearest_round_the_exact_advantage_and_one_word_for_epsilon():
    case = statement([(central(5.0), 10), (central(2.0), 1)])
    assert (case.epsilon_round, case.rounds) == (compose([(central(2.0), 1)], 1e-5).epsilon, 11)
    assert CASES["central"].membership_advantage == pytest.approx(gdp.delta(0.0, 0.4 * math.sqrt(50)), rel=1e-12)
    assert CASES["central"].attack_success == pytest.approx(0.92135, abs=1e-5)
    words = {0.5: "strong", 8.0: "moderate", 15.5: "weak", 289.0: "very weak", math.inf: "none"}
    assert {epsilon: strength(epsilon) for epsilon in words} == words


@pytest.mark.parametrize("epsilon", [0.0, 0.5, 3.0, 20.0, 800.0, 1e5])
def test_advantage_of_epsilon_delta_is_the_total_variation_bound(epsilon):
    delta = 1e-5
    bound = membership_advantage(Guarantee(epsilon, delta, "replace-one", "local", "x"))
    if epsilon < 700:
        assert bound == pytest.approx((math.exp(epsilon) - 1 + 2 * delta) / (math.exp(epsilon) + 1), rel=1e-12)
    assert delta <= bound + 1e-18
    assert bound <= 1.0


def test_a_box_shows_its_rows_and_escapes_them():
    box = card("title", ["line"], rows=[("a < b", "&"), ("c", "d")])
    assert "<tr><td>a &lt; b</td><td>&amp;</td></tr><tr><td>c</td><td>d</td></tr>" in box
    assert "<table" not in card("title", ["line"])
