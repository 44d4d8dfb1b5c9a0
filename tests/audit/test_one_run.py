"""Two tests for one run with many canaries: valid under the law that they assume, and the second one stronger."""

import math

import numpy as np
import pytest
from scipy.stats import binom

from dpfedexp.accounting import gdp
from dpfedexp.audit.runs import best_guess, epsilon_of_guesses, mu_of_guesses, p_value, refutes_gdp


def steinke(delta):
    return lambda *guessed: epsilon_of_guesses(*guessed, delta)


def guesses_of_a_gaussian(mu, canaries, guesses, chance):
    """How many are right where every canary's coin shifts its own score by μ: no attacker does better at μ-GDP."""
    coins = chance.random(canaries) < 0.5
    order = np.argsort(mu * coins + chance.normal(size=canaries))
    half = guesses // 2
    return int(coins[order[canaries - half :]].sum() + (~coins[order[:half]]).sum())


def test_guesses_of_randomized_response_prove_its_epsilon_and_no_more():
    """Every canary's coin is shown with the bias of ε = 2, so that no attacker can be better than that."""
    chance = np.random.default_rng(2)
    epsilon, canaries = 2.0, 4000
    coins = chance.random(canaries) < 0.5
    honest = chance.random(canaries) < 1 / (1 + math.exp(-epsilon))
    scores = np.where(coins == honest, 1.0, 0.0) + 1e-6 * chance.random(canaries)
    found, *_ = best_guess(scores, coins, steinke(0.0), 1e-6)
    assert 0.8 * epsilon < found <= epsilon


def test_blind_guesses_prove_nothing():
    chance = np.random.default_rng(3)
    coins = chance.random(1000) < 0.5
    scores = chance.random(1000)
    assert best_guess(scores, coins, steinke(1e-9), 1e-6)[0] == 0.0
    assert best_guess(scores, coins, mu_of_guesses, 1e-6)[0] == 0.0


def test_the_p_value_is_the_binomial_tail_and_what_delta_adds():
    assert p_value(100, 50, 40, 1.0, 0.0) == pytest.approx(binom.sf(39, 50, 1 / (1 + math.exp(-1))))
    assert p_value(100, 50, 40, 1.0, 1e-5) > p_value(100, 50, 40, 1.0, 0.0)
    assert p_value(100, 50, 50, 40.0, 0.0) == pytest.approx(1.0)
    for epsilon in (0.0, 1.0, 3.0):
        below = [binom.pmf(range(40 - i, 40), 50, 1 / (1 + math.exp(-epsilon))).sum() / i for i in range(1, 41)]
        expected = binom.sf(39, 50, 1 / (1 + math.exp(-epsilon))) + 2 * 100 * 1e-5 * max(below)
        assert p_value(100, 50, 40, epsilon, 1e-5) == pytest.approx(min(1.0, expected))


def test_an_epsilon_of_guesses_is_at_the_edge_of_its_p_value():
    found = epsilon_of_guesses(1000, 500, 480, 1e-6, 1e-9)
    assert p_value(1000, 500, 480, found, 1e-9) <= 1e-6
    assert p_value(1000, 500, 480, found + 1e-3, 1e-9) > 1e-6


@pytest.mark.parametrize(("mu", "guesses"), [(0.0, 20), (0.5, 60), (1.0, 100), (2.0, 20), (2.0, 100)])
def test_a_gaussian_mechanism_is_refuted_no_more_often_than_the_failure_probability(mu, guesses):
    """At a failure probability of 0.2, in 400 runs: at most 80, give or take five deviations."""
    chance = np.random.default_rng(4)
    right = [guesses_of_a_gaussian(mu, 100, guesses, chance) for _ in range(400)]
    refuted = {r: refutes_gdp(100, guesses, r, mu, 0.2) for r in set(right)}
    assert sum(refuted[r] for r in right) <= 400 * 0.2 + 5 * math.sqrt(400 * 0.16)


def test_at_mu_zero_the_recursion_is_no_stronger_than_fair_coins():
    """Coins that nothing is known about: c of c' right is refuted only where the binomial tail is below the failure probability."""
    for failure in (0.2, 0.01, 1e-6):
        for right in range(51):
            if refutes_gdp(200, 50, right, 0.0, failure):
                assert binom.sf(right - 1, 50, 0.5) <= failure


def test_right_guesses_prove_more_and_failure_probabilities_less():
    proven = [mu_of_guesses(1000, 200, right, 1e-6) for right in range(0, 201, 10)]
    assert proven == sorted(proven)
    assert mu_of_guesses(1000, 200, 200, 1e-9) < proven[-1] < mu_of_guesses(1000, 200, 200, 0.05)
    at = mu_of_guesses(1000, 200, 190, 1e-6)
    assert refutes_gdp(1000, 200, 190, at, 1e-6)
    assert not refutes_gdp(1000, 200, 190, at + 1e-4, 1e-6)


def test_few_guesses_prove_nothing():
    assert {mu_of_guesses(1000, guesses, right, 1e-6) for guesses, right in ((0, 0), (10, 0), (1, 1), (3, 3))} == {0.0}


def test_the_test_for_f_dp_proves_more_than_the_one_for_epsilon_and_delta():
    """At the usual δ the older test proves nothing with 1,000 canaries; at 95% the newer one reaches a third of the truth."""
    chance = np.random.default_rng(5)
    mu, delta = 3.0, 1e-5
    right = guesses_of_a_gaussian(mu, 1000, 500, chance)
    newer = gdp.epsilon(mu_of_guesses(1000, 500, right, 1e-6), delta)
    assert epsilon_of_guesses(1000, 500, right, 1e-6, delta) == 0.0
    assert newer > 2.5
    confident = gdp.epsilon(mu_of_guesses(1000, 500, right, 0.05), delta)
    assert confident > 1.5 * epsilon_of_guesses(1000, 500, right, 0.05, delta)
    assert gdp.epsilon(mu, delta) / 3 < confident < gdp.epsilon(mu, delta)
