"""The rate that votes say: right where they are clean, the usual one where they are noise, and lower only where most are harmed."""

import math

import pytest
import torch

from dpfedexp.local_rate import (
    MOST_PROGRESS,
    RADII,
    RATES,
    USUAL,
    chosen,
    located,
    on_grid,
    slowed,
    wants_more,
    watched,
)

CLEAN = torch.full((len(RATES),), 1e-6, dtype=torch.float64)


def test_a_client_wants_more_only_if_it_was_helped_more_than_by_the_next_rate_and_did_not_learn_its_data_by_heart():
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, -2.0])
    after = torch.tensor([0.9, 1.1, 0.9, 0.4, math.inf, -2.1])
    smaller = torch.tensor([0.95, 1.2, 0.8, 0.6, math.inf, -2.05])
    assert wants_more(before, after, smaller).tolist() == [True, False, False, False, False, True]
    assert MOST_PROGRESS == 0.5


@pytest.mark.parametrize("at", range(len(RATES)))
def test_clean_votes_choose_the_largest_rate_that_clients_want(at):
    """Up to a third of a half decade, by which the prior draws the ends of the grid inwards."""
    votes = (torch.arange(len(RATES)) <= at).double()
    assert chosen(votes, CLEAN) == pytest.approx(RATES[at], rel=0.4)
    assert at not in range(4, 9) or chosen(votes, CLEAN) == pytest.approx(RATES[at], rel=0.06)


@pytest.mark.parametrize("at", range(1, len(RADII)))
def test_clean_votes_find_the_middle_of_the_update_norms(at):
    """All updates lie between two radii of the grid, so that the middle is between them."""
    votes = (torch.arange(len(RADII)) < at).double()
    found = located(votes, torch.full((len(RADII),), 1e-6, dtype=torch.float64))
    assert found == pytest.approx(RADII[at - 1] * 10**0.25, rel=0.4)


def test_a_minority_far_above_the_right_rate_is_no_vote_for_it():
    votes = torch.where(torch.arange(len(RATES)) <= 5, 0.95, 0.33).double()
    assert RATES[5] < chosen(votes, torch.full_like(votes, 0.1)) < RATES[6]


def test_noise_of_a_third_of_the_clients_on_every_bin_leaves_the_rate_known_to_half_a_decade():
    """Each bin beside the step tells 1 from 0 by three deviations. The sum of the means would deviate by √13/3 half decades."""
    votes, generator = (torch.arange(len(RATES)) <= 6).double(), torch.Generator().manual_seed(0)
    noisy = votes + torch.randn(400, len(RATES), generator=generator, dtype=torch.float64) / 3
    found = torch.tensor([2 * math.log10(chosen(row, torch.full_like(row, 1 / 3)) / RATES[6]) for row in noisy])
    assert float(found.mean().abs()) < 0.2
    assert float(found.std()) < 0.7
    assert float(found.abs().max()) < 3.0


@pytest.mark.parametrize("votes", [-50.0, 0.0, 0.5, 1.0, 50.0])
def test_votes_that_are_all_noise_leave_the_usual_rate(votes):
    found = chosen(torch.full((len(RATES),), votes, dtype=torch.float64), 1000.0 * torch.ones_like(CLEAN))
    assert found == pytest.approx(USUAL, rel=0.03)


def test_the_rate_stays_on_the_grid_whatever_the_votes_are():
    for votes in (-1e9, 1e9, math.nan, math.inf, -math.inf):
        assert RATES[0] <= chosen(torch.full((len(RATES),), votes, dtype=torch.float64), CLEAN) <= RATES[-1]
    assert on_grid(RATES, 0.5) == pytest.approx(10**-3.75)


def test_the_rate_is_lower_only_where_noise_is_longer_than_any_update():
    assert [slowed(0.2, n) for n in (0.0, 0.5, 1.0, 2.0, 8.0)] == pytest.approx([0.2, 0.2, 0.2, 0.1, 0.025])


def test_the_rate_falls_only_where_more_than_a_tenth_is_harmed():
    assert watched(0.3, 1.0, 1.0, 0.0) == (0.3, 1.0)
    assert watched(0.3, 0.95, 0.95, 0.0)[0] == 0.3
    rate, mean = watched(0.3, 1.0, 0.0, 0.0)
    assert mean == pytest.approx(0.7)
    assert rate == pytest.approx(0.3 * math.exp(-2 * 0.2))
    rates, mean, rate = [], 1.0, 1.0
    for _ in range(20):
        rate, mean = watched(rate, mean, 0.5, 0.05)
        rates.append(rate)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 1e-4


@pytest.mark.parametrize("deviation", [0.05, 0.15, 1.0])
def test_noise_does_not_lower_a_rate_that_helps_everybody(deviation):
    """Over 100 rounds, in nearly all of 200 runs."""
    generator, ends = torch.Generator().manual_seed(1), []
    for _ in range(200):
        rate, mean = 1.0, 1.0
        for noise in torch.randn(100, generator=generator).tolist():
            rate, mean = watched(rate, mean, 1.0 + deviation * noise, deviation)
        ends.append(rate)
    assert sorted(ends)[20] > 0.7
