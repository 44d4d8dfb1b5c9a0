"""What samples prove, what an attack would prove of a tight claim, and the outcome that follows."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import beta

from dpfedexp.accounting import gdp
from dpfedexp.audit import bounds
from dpfedexp.audit.bounds import Power, Result, epsilon_score, lower_bound, mu_score, skip
from dpfedexp.audit.mechanisms import discriminant

CONFIDENCE = 1 - 1e-6
MADE = Result("mechanism", "a mechanism", "μ", 0.9, 1.0, CONFIDENCE, power=Power(0.92, 0.5))


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 10), (5, 10), (10, 10), (37, 1000), (1000, 1000)])
def test_rates_are_bounded_as_clopper_and_pearson_say(successes, trials):
    failure, count = 0.01, np.array(float(successes))
    low, high = bounds.rate_at_least(count, trials, failure), bounds.rate_at_most(count, trials, failure)
    smallest = beta.ppf(failure, successes, trials - successes + 1) if successes else 0.0
    most = beta.ppf(1 - failure, successes + 1, trials - successes) if successes < trials else 1.0
    assert (float(low), float(high)) == pytest.approx((smallest, most), abs=1e-12)


def test_the_confidence_is_kept_when_there_is_nothing_to_find():
    """Two samples of the same law at 90%: a bound above 0 may come in one of ten trials, give or take five deviations."""
    chance = np.random.default_rng(1)
    above = 0
    for _ in range(200):
        x, y = chance.normal(size=(2, 400))
        above += lower_bound(x, y, epsilon_score(0.0), 0.9) > 0
    assert above <= 200 * 0.1 + 5 * math.sqrt(200 * 0.09)


def test_a_direction_is_found_also_where_noises_cancel():
    chance = np.random.default_rng(4)
    shared = chance.normal(size=(2, 2000))
    here, there = (np.stack([shared[n], shift + shared[n]], axis=1) for n, shift in enumerate((0.1, 0.0)))
    direction = discriminant(here, there)
    assert (here @ direction).min() > (there @ direction).max()


@pytest.mark.parametrize(
    ("score", "truth_of"),
    [(mu_score, lambda mu: mu), (epsilon_score(0.01), lambda mu: gdp.epsilon(mu, 0.01))],
    ids=["μ", "ε"],
)
@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0, 2.0])
def test_bounds_are_below_the_truth_and_what_is_expected_of_a_tight_claim(mu, score, truth_of):
    """In ten trials of 100,000 samples the bounds' own spread is about 5%."""
    chance, truth = np.random.default_rng(0), truth_of(mu)
    power = bounds.power_of_shift(mu, (100_000, 100_000), score, CONFIDENCE)
    draws = [(chance.normal(mu, 1, 100_000), chance.normal(0, 1, 100_000)) for _ in range(10)]
    found = [lower_bound(*pair, score, CONFIDENCE) for pair in draws]
    assert np.mean(found) == pytest.approx(power.expected, rel=0.07)
    assert power.expected >= 0.65 * truth
    assert power.minimum <= min(found) <= max(found) <= truth
    assert (power.minimum > 0) == (mu > 0)
    assert lower_bound(*draws[0][::-1], score, CONFIDENCE) == found[0], "in both directions"


def test_a_sampled_client_is_found_as_often_as_expected():
    chance = np.random.default_rng(1)
    n, rate, rounds, mu = 6000, 0.5, 4, 2.0
    power = bounds.power_of_shift(mu, (n, n), epsilon_score(0.01), CONFIDENCE, rate, rounds)

    def world(sign):
        return ((chance.random((n, rounds)) < rate) * sign * mu / 2 + chance.normal(size=(n, rounds))).mean(1)

    found = [lower_bound(world(1), world(-1), epsilon_score(0.01), CONFIDENCE) for _ in range(5)]
    assert np.mean(found) == pytest.approx(power.expected, rel=0.15)
    assert min(found) > power.minimum


@pytest.mark.parametrize(
    ("change", "outcome", "fails"),
    [
        ({}, "holds", False),
        ({"lower": 1.01}, "BROKEN", True),
        ({"lower": math.inf}, "BROKEN", True),
        ({"lower": math.nan}, "BROKEN", True),
        ({"lower": 0.3}, "NO POWER", True),
        ({"lower": 0.0, "power": Power(0.0, 0.0)}, "NO POWER", True),
        ({"lower": 0.3, "one_sided": True}, "holds", False),
        ({"lower": 1.1, "one_sided": True}, "BROKEN", True),
        ({"power": None}, "NO POWER", True),
        ({"power": None, "detects": "≥ 0.1"}, "holds", False),
    ],
)
def test_an_outcome_is_one_of_three_and_only_holding_passes(change, outcome, fails):
    result = replace(MADE, **change)
    assert (result.outcome, result.fails, result.holds) == (outcome, fails, not fails)
    result = skip("black box", "Flower", "Flower is not installed")
    assert (result.outcome, result.fails, result.holds) == ("not audited", False, False)


def test_correlations_of_independent_rows_stay_below_the_limit_and_repetitions_do_not():
    rows = np.random.default_rng(2).normal(size=(20, 256))
    limit = bounds.correlation_limit(20, 256, 1e-8)
    assert bounds.largest_correlation(rows) < limit < 0.6
    # The limit is not idle: at a failure probability of one half it is about what is seen.
    assert bounds.largest_correlation(rows) > 0.75 * bounds.correlation_limit(20, 256, 0.5)
    shifted = np.concatenate([rows, np.roll(rows[:1], 7, axis=1)])
    every_fourth = np.concatenate([rows, np.tile(rows[:1, :4], 64)])
    assert bounds.largest_correlation(shifted) == pytest.approx(1.0)
    assert bounds.largest_correlation(every_fourth) == pytest.approx(1.0)
    assert bounds.largest_correlation(np.zeros((2, 8))) == 1.0


def test_the_distance_from_the_uniform_law_is_the_one_of_kolmogorov():
    assert bounds.distance(np.array([0.1, 0.2, 0.9])) == pytest.approx(2 / 3 - 0.2)
    uniforms = np.random.default_rng(3).random(5000)
    assert bounds.distance(uniforms) < bounds.distance_limit(5000, 1e-8) < bounds.distance(0.8 * uniforms)
