"""Private selection: dearer than one run, cheaper than many, and a number of runs of the right law."""

import math

import pytest

from dpfedexp.accounting import gdp
from dpfedexp.accounting.pld import number_of_runs, selection_epsilon
from dpfedexp.errors import InputError


def rdp_bound(mu, delta, runs):
    """Papernot and Steinke 2022, theorem 2 with η = 1 and γ = 1/runs, on a fine grid of orders; a μ-GDP run has ε(λ) = λμ²/2."""
    orders = [1 + 2 ** (k / 16) for k in range(-80, 160)]
    extra = min(2 * (1 - 1 / o) * (o * mu**2 / 2) + 2 * math.log(runs) / o for o in orders)
    return min(
        o * mu**2 / 2 + extra + math.log(runs) / (o - 1) + math.log1p(-1 / o) - math.log(delta * o) / (o - 1)
        for o in orders
    )


@pytest.mark.parametrize("runs", [2.0, 10.0, 100.0])
@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_the_figure_is_that_of_the_theorem(epsilon, runs):
    mu = gdp.mu(epsilon, 1e-5)
    assert selection_epsilon(mu, 1e-5, runs) == pytest.approx(rdp_bound(mu, 1e-5, runs), rel=0.03)


def test_many_runs_cost_less_than_their_composition_and_more_than_one():
    mu = gdp.mu(8.0, 1e-5)
    figures = [selection_epsilon(mu, 1e-5, runs) for runs in (2.0, 5.0, 30.0)]
    assert 8.0 < figures[0] < figures[1] < figures[2] < gdp.epsilon(mu * math.sqrt(5), 1e-5)


def test_the_number_of_runs_is_geometric():
    draws = [number_of_runs(4.0, (k + 0.5) / 20_000) for k in range(20_000)]
    assert min(draws) == 1
    assert sum(draws) / len(draws) == pytest.approx(4.0, rel=0.01)
    assert sum(draw == 1 for draw in draws) / len(draws) == pytest.approx(0.25, abs=1e-3)


@pytest.mark.parametrize(
    ("mu", "delta", "runs", "sentence"),
    [
        (0.0, 1e-5, 2.0, "mu is 0.0"),
        (1.0, 0.0, 2.0, "delta is 0.0"),
        (1.0, 1e-5, 1.0, "the mean number of runs must be above 1"),
    ],
)
def test_wrong_numbers_are_refused(mu, delta, runs, sentence):
    with pytest.raises(InputError, match=sentence):
        selection_epsilon(mu, delta, runs)
