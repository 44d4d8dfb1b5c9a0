"""The rate that votes say: right where they are clean, the usual one where they are noise, and lower only where most are harmed."""

import math

import pytest
import torch

from dpfedexp.local_rate import MOST_PROGRESS, RADII, RATES, USUAL, chosen, located, on_grid, wants_more, watched

CLEAN = torch.full((len(RATES),), 1e-6, dtype=torch.float64)


def test_a_client_wants_more_only_if_it_was_helped_more_than_by_the_next_rate_and_did_not_learn_its_data_by_heart():
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -2.0])
    after = torch.tensor([0.9, 1.1, 0.9, 0.4, math.inf, -2.1])
    smaller = torch.tensor([0.95, 1.2, 0.8, 0.6, math.inf, -2.05])
    assert wants_more(before, after, smaller).tolist() == [True, False, False, False, False, True]
    assert MOST_PROGRESS == 0.5


@pytest.mark.parametrize("at", [0, 3, 6, len(RATES) - 1])
def test_clean_votes_choose_the_largest_rate_that_clients_want(at):
    votes = (torch.arange(len(RATES)) <= at).double()
    assert chosen(votes, CLEAN) == pytest.approx(RATES[at], rel=1e-6)


@pytest.mark.parametrize("at", [0, 7, len(RADII) - 1])
def test_clean_votes_find_the_middle_of_the_update_norms(at):
    """All updates lie between two radii of the grid, so that the middle is between them."""
    votes = (torch.arange(len(RADII)) < at).double()
    found = located(votes, torch.full((len(RADII),), 1e-6, dtype=torch.float64))
    assert found == pytest.approx(RADII[max(at - 1, 0)] * 10 ** (0.25 if at else 0), rel=1e-6)


@pytest.mark.parametrize("votes", [-50.0, 0.0, 0.5, 1.0, 50.0])
def test_votes_that_are_all_noise_leave_the_usual_rate(votes):
    """A doubt of 13 × 100² against a prior of 2² weighs the votes by 3e-5, and 13 of them of at most 50 move it by 0.02 steps."""
    found = chosen(torch.full((len(RATES),), votes, dtype=torch.float64), 100.0 * torch.ones_like(CLEAN))
    assert found == pytest.approx(USUAL, rel=0.03)


def test_the_rate_stays_on_the_grid_whatever_the_votes_are():
    for votes in (-1e9, 1e9, math.nan, math.inf, -math.inf):
        assert RATES[0] <= chosen(torch.full((len(RATES),), votes, dtype=torch.float64), CLEAN) <= RATES[-1]
    assert on_grid(RATES, 0.5) == pytest.approx(10**-3.75)


def test_the_rate_falls_only_where_more_than_a_tenth_is_harmed():
    assert watched(0.3, 1.0, 1.0) == (0.3, 1.0)
    assert watched(0.3, 0.95, 0.95)[0] == 0.3
    assert watched(0.3, 1.0, 2.5) == (0.3, 1.0), "noise above 1 must not be credit for later"
    rate, mean = watched(0.3, 1.0, 0.0)
    assert mean == pytest.approx(0.7)
    assert rate == pytest.approx(0.3 * math.exp(-2 * 0.2))
    rates, mean, rate = [], 1.0, 1.0
    for _ in range(20):
        rate, mean = watched(rate, mean, 0.5)
        rates.append(rate)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-4
