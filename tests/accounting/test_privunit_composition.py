"""Composition of PrivUnit reports against enumeration, mpmath and other accountants, and their events."""

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import from_randomized_response

from dpfedexp.accounting import PrivUnitEvent, PureEvent, compose
from dpfedexp.accounting import privunit as accountant
from dpfedexp.accounting.events import Sampling
from dpfedexp.accounting.events import privunit as exact_event
from dpfedexp.accounting.privunit import PURE, epsilon
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import PrivUnit
from dpfedexp.mechanisms.privunit import ScalarDP

PAPER = exact_event(2.0, 2.0, 2.0)

OTHER = PrivUnitEvent(p=0.7, cap=0.3, epsilon2=1.0, k=2, nominal=3.0)


def atoms(event: PrivUnitEvent) -> list[tuple[float, float]]:
    """(loss, probability) of one report, written out from the definition of the mechanism."""
    direction = event.direction_epsilon
    away = (1 - event.p) * event.cap / (1 - event.cap)
    e2, total = event.epsilon2, math.exp(event.epsilon2) + event.k
    first = [(direction, event.p), (-direction, away), (0.0, 1 - event.p - away)]
    second = [(e2, math.exp(e2) / total), (-e2, 1 / total), (0.0, (event.k - 1) / total)]
    return [(a + b, p * q) for (a, p), (b, q) in itertools.product(first, second)]


def delta_of(charges, epsilon: float) -> float:
    """δ(ε) of all reports together, as the accountant inverts it."""
    return accountant._Losses(accountant._parts(charges)).delta(epsilon)


def enumerate_delta(events: list[PrivUnitEvent], epsilon: float) -> float:
    """δ(ε) as the sum over every combination of outcomes."""
    total = 0.0
    for outcome in itertools.product(*(atoms(event) for event in events)):
        loss, probability = sum(a for a, _ in outcome), math.prod(p for _, p in outcome)
        total += probability * max(0.0, -math.expm1(epsilon - loss))
    return total


@pytest.mark.parametrize("epsilon", [0.0, 4.0, 13.0, 17.9])
def test_heterogeneous_reports_match_enumeration(epsilon):
    exact = enumerate_delta([PAPER, PAPER, OTHER], epsilon)
    assert delta_of([(PAPER, 2), (OTHER, 1)], epsilon) == pytest.approx(exact, rel=1e-11, abs=1e-15)


def test_50_rounds_match_50_digits():
    """The same double sum over both lattices, in multiprecision."""
    rounds, epsilon = 50, 289.67
    with mpmath.workdps(50):
        lattices = []
        for part in PAPER.losses():
            step, up = mpmath.mpf(part.step), mpmath.mpf(part.up)
            down = up * mpmath.exp(-step)
            pmf = functools.reduce(np.convolve, [np.array([down, 1 - up - down, up])] * rounds)
            lattices.append([(place * step, p) for place, p in enumerate(pmf, -rounds)])
        exact = mpmath.fsum(
            p * q * (1 - mpmath.exp(epsilon - i - j))
            for (i, p), (j, q) in itertools.product(*lattices)
            if i + j > epsilon
        )
    assert delta_of([(PAPER, rounds)], epsilon) == pytest.approx(float(exact), rel=1e-9)


def test_agrees_with_dp_accounting_on_randomized_response():
    """Two levels (k = 1) and no direction are randomized response, which dp-accounting composes on a grid."""
    event = PrivUnitEvent(p=0.5, cap=0.5, epsilon2=1.0, k=1, nominal=1.0)
    one = from_randomized_response(2.0 / (math.exp(1.0) + 1.0), 2, value_discretization_interval=1e-4)
    # Losses are rounded up to the grid there, by at most 30 · 1e-4 in total.
    theirs = one.self_compose(30).get_epsilon_for_delta(1e-5)
    assert compose([(event, 30)], 1e-5).epsilon == pytest.approx(theirs, abs=30e-4)


def test_10_000_rounds_take_few_convolutions_and_are_tighter_than_renyi(monkeypatch):
    convolve, made = np.convolve, []
    monkeypatch.setattr(np, "convolve", lambda *given: made.append(given) or convolve(*given))
    total = compose([(PAPER, 10_000)], 1e-5)
    # By squaring: at most two for each binary digit of 10,000, in each of two lattices.
    assert 0 < len(made) <= 2 * 2 * 14
    assert total.accountant == accountant.EXACT
    assert total.epsilon < 60_000
    for rounds, delta in ((10_000, 1e-5), (1, 1e-12), (50, 1e-5), (400, 1e-2)):
        exact, _ = accountant.epsilon([(PAPER, rounds)], delta)
        assert accountant._renyi_epsilon(accountant._parts([(PAPER, rounds)]), delta) >= exact


MANY = [(exact_event(1.0 + i / 10, 2.0, 1.0 + i / 7), 200) for i in range(5)]


@pytest.mark.parametrize(
    "charges", [[(PAPER, 30_000)], [(PAPER, 10**9)], MANY], ids=["rounds", "far more", "different"]
)
def test_beyond_the_exact_limit_a_named_sound_bound_stands_in(charges):
    total = compose(charges, 1e-5)
    assert (total.accountant, total.exact) == (accountant.RENYI, False)
    expected = sum(rounds * probability * loss for event, rounds in charges for loss, probability in atoms(event))
    assert expected < total.epsilon < accountant.pure_epsilon(charges)


def test_many_releases_of_randomized_response_cost_about_half_the_square_of_their_epsilons():
    """No loss of theirs is 0. RDP: Tε²/2 = 50, and √(2·T·ε²·log(1/δ)) = 48."""
    total = compose([(PureEvent(0.02, "local"), 250_000)], 1e-5)
    assert (total.accountant, total.exact) == (accountant.RENYI_BOUND, False)
    assert 80.0 < total.epsilon < 50.0 + 48.0


def test_overlapping_caps_are_charged_as_randomized_response():
    event = PrivUnitEvent(p=0.9, cap=0.6, epsilon2=1.0, k=2, nominal=3.0)
    direction = event.losses()[0]
    assert direction.up == pytest.approx(1 / (1 + math.exp(-event.direction_epsilon)))
    assert direction.stay == pytest.approx(0.0, abs=1e-15)


def test_an_epsilon2_that_asks_for_a_whole_number_of_levels_gets_it_here_and_in_the_mechanism():
    """e^{ε₂/3} is then that number up to rounding, which must not add a level to one of the two."""
    for levels in range(2, 60):
        epsilon2 = 3.0 * math.log(levels)
        assert exact_event(1.0, 1.0, epsilon2).k == ScalarDP(epsilon2, 1.0).k == levels


def test_the_event_of_the_exact_gamma_is_the_mechanisms_own():
    event = exact_event(1.0, 2.0, 4.0)
    assert event == PrivUnit(0.3, 50, 1.0, 2.0, 4.0).event(Sampling())
    assert (event.exact, event.nominal, event.k) == (True, 7.0, math.ceil(math.exp(4.0 / 3.0)))
    assert event.direction_epsilon == pytest.approx(3.0, rel=1e-12)
    assert compose([(event, 5)], 0.0).exact


def test_reports_at_the_ends():
    for p, cap in ((1.0, 0.3), (0.9, 0.0)):
        assert PrivUnitEvent(p, cap, epsilon2=1.0, k=2, nominal=3.0).epsilon == math.inf
    assert epsilon([(exact_event(0.01, 0.01, 0.01), 1)], 0.5)[0] == 0.0, "δ covers every loss"
    one = [(exact_event(1.0, 1.0, 1.0), 1)]
    assert epsilon(one, delta_of(one, 0.0))[0] == 0.0, "δ is that of ε = 0 to the last bit"
    silent = PrivUnitEvent(p=0.5, cap=0.5, epsilon2=0.0, k=1, nominal=0.0)
    assert epsilon([(silent, 5)], 1e-5) == (0.0, PURE)
    assert epsilon([(silent, 5), (exact_event(0.4, 0.3, 0.3), 1)], 0.1)[0] < 1.0 - 1e-3, "δ buys something"


@pytest.mark.parametrize("place", range(3))
def test_each_epsilon_may_be_500_and_neither_0_nor_more(place):
    given = [1.0, 1.0, 1.0]
    assert exact_event(*given[:place], 500.0, *given[place + 1 :]).nominal == 502.0
    for wrong in (0.0, 500.5):
        with pytest.raises(InputError, match=f"epsilon{place}"):
            exact_event(*given[:place], wrong, *given[place + 1 :])
