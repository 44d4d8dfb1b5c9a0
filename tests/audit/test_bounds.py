import math

import numpy as np
import pytest
from scipy.stats import beta, binom

from dpfedexp.accounting import gdp
from dpfedexp.audit.bounds import epsilon_score, lower_bound, mu_score, rate_at_least, rate_at_most


@pytest.mark.parametrize(("successes", "trials"), [(0, 10), (1, 10), (5, 10), (10, 10), (37, 1000), (1000, 1000)])
def test_rates_are_bounded_as_clopper_and_pearson_say(successes, trials):
    failure = 0.01
    low, high = (
        rate_at_least(np.array(float(successes)), trials, failure),
        rate_at_most(np.array(float(successes)), trials, failure),
    )
    assert float(low) == pytest.approx(
        beta.ppf(failure, successes, trials - successes + 1) if successes else 0.0, abs=1e-12
    )
    assert float(high) == pytest.approx(
        beta.ppf(1 - failure, successes + 1, trials - successes) if successes < trials else 1.0
    )
    assert successes == 0 or binom.sf(successes - 1, trials, low) <= failure * (1 + 1e-6)
    assert successes == trials or binom.cdf(successes, trials, high) <= failure * (1 + 1e-6)


@pytest.mark.parametrize("mu", [0.0, 0.5, 1.0, 2.0])
def test_bounds_between_two_gaussians_are_below_the_truth_and_near_it(mu):
    chance = np.random.default_rng(0)
    here, there = chance.normal(mu, 1, 400_000), chance.normal(0, 1, 400_000)
    truth = gdp.epsilon(mu, 0.01)
    found = lower_bound(here, there, epsilon_score(0.01), 1 - 1e-6).value
    assert found <= truth
    assert found >= 0.7 * truth
    assert lower_bound(there, here, epsilon_score(0.01), 1 - 1e-6).value >= 0.7 * truth, "in both directions"
    proven = lower_bound(here, there, mu_score, 1 - 1e-6).value
    assert 0.95 * mu - 0.03 <= proven <= mu


def test_the_confidence_is_kept_when_there_is_nothing_to_find():
    """Two samples of the same law at 90%: a bound above 0 may come in one of ten trials, give or take five deviations."""
    chance = np.random.default_rng(1)
    above = 0
    for _ in range(200):
        x, y = chance.normal(size=(2, 400))
        above += lower_bound(x, y, epsilon_score(0.0), 0.9).value > 0
    assert above <= 200 * 0.1 + 5 * math.sqrt(200 * 0.09)


def test_a_direction_is_found_also_where_noises_cancel():
    from dpfedexp.audit.mechanisms.release import discriminant

    chance = np.random.default_rng(4)
    shared = chance.normal(size=(2, 2000))
    here, there = (np.stack([shared[n], shift + shared[n]], axis=1) for n, shift in enumerate((0.1, 0.0)))
    direction = discriminant(here, there)
    assert (here @ direction).min() > (there @ direction).max()
