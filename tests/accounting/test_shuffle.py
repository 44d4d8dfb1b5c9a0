"""Amplification by shuffling is claimed only where its theorem holds, and never below what a shuffle really gives away."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from dpfedexp.accounting import compose
from dpfedexp.accounting import statement as shuffle
from dpfedexp.accounting.charges import privunit as exact_event


def clones_delta(epsilon0: float, n: int, epsilon: float) -> float:
    """δ(ε) of n shuffled reports of binary randomised response at ε₀, the others' inputs all 0: a lower bound for any theorem.

    What is seen is how many said 1: the protected client's answer and Binomial(n − 1, p) others.
    """
    p = 1.0 / (1.0 + math.exp(epsilon0))
    others = stats.binom.pmf(np.arange(n), n - 1, p)
    zero = (1 - p) * np.append(others, 0.0) + p * np.append(0.0, others)
    one = p * np.append(others, 0.0) + (1 - p) * np.append(0.0, others)
    return max(
        np.maximum(0.0, one - math.exp(epsilon) * zero).sum(), np.maximum(0.0, zero - math.exp(epsilon) * one).sum()
    )


@pytest.mark.parametrize("epsilon0", [0.1, 0.5, 1.0, 1.3])
@pytest.mark.parametrize("n", [1000, 20_000])
def test_the_bound_covers_shuffled_randomised_response(epsilon0, n):
    epsilon = shuffle.amplified(epsilon0, n, 1e-6)
    assert 0 < epsilon <= epsilon0
    assert clones_delta(epsilon0, n, epsilon) <= 1e-6


def test_the_closed_form_of_the_theorem():
    expected = math.log(
        1 + (math.e - 1) / (math.e + 1) * (8 * math.sqrt(math.e * math.log(4e6) / 1e5) + 8 * math.e / 1e5)
    )
    assert shuffle.amplified(1.0, 100_000, 1e-6) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("epsilon0", "n"), [(5.586, 1000), (6.0, 1000), (1.0, 100), (0.1, 1), (1.0, 0)])
def test_nothing_is_claimed_outside_the_condition(epsilon0, n):
    assert shuffle.amplified(epsilon0, n, 1e-5) is None
    assert shuffle.amplified(1.0, 10**6, 0.0) is None


def test_rounds_compose_to_more_than_one_and_less_than_their_sum():
    event, n, delta = exact_event(0.2, 0.2, 0.1), 50_000, 1e-6
    totals = [shuffle.shuffled_epsilon([(event, t)], delta, n) for t in (1, 2, 10, 50)]
    assert totals[0] == shuffle.amplified(event.epsilon, n, delta)
    assert totals == sorted(totals)
    assert totals[-1] < 50 * shuffle.amplified(event.epsilon, n, delta / 100)
    assert totals[-1] < compose([(event, 50)], delta).epsilon
    mixed = shuffle.shuffled_epsilon([(event, 49), (exact_event(0.1, 0.1, 0.1), 1)], delta, n)
    assert totals[2] < mixed < totals[-1]


def test_composition_covers_the_exact_one_of_randomised_response_with_failures():
    """Kairouz, Oh and Viswanath: δ = 1 − (1 − δ₁)^T·(1 − δ'), with δ' that of T randomised responses."""
    event, n, delta, rounds = exact_event(0.2, 0.2, 0.1), 50_000, 1e-6, 30
    share = delta / (2 * rounds)
    one = shuffle.amplified(event.epsilon, n, share)
    total = shuffle.shuffled_epsilon([(event, rounds)], delta, n)
    heads = np.arange(rounds + 1)
    loss = (2 * heads - rounds) * one
    mass = stats.binom.pmf(heads, rounds, 1 / (1 + math.exp(-one)))
    composed = float(np.sum(mass * np.maximum(0.0, 1 - np.exp(total - loss))))
    assert 1 - (1 - share) ** rounds * (1 - composed) <= delta * (1 + 1e-9)


def test_one_round_outside_the_condition_spoils_them_all():
    good, bad = exact_event(0.1, 0.1, 0.1), exact_event(2.0, 2.0, 2.0)
    assert shuffle.shuffled_epsilon([(good, 10), (bad, 1)], 1e-5, 10_000) is None
