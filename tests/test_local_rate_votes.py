"""The local rate that sets itself: what votes make of it, and what the probe costs."""

import math

import pytest
import torch
from dpfedexp.simulation.probe import Probe

from dpfedexp.accounting import Sampling
from dpfedexp.local_rate import (
    CLIP_SHARE,
    FALL,
    MOST_HARMED,
    RADII,
    RATE_SHARE,
    RATES,
    USUAL,
    chosen,
    located,
    probe_noise,
    wants_more,
    watched,
)
from dpfedexp.mechanisms import CentralGaussian

CERTAIN, NOISE = 0.0, 1e6


def doubt(grid, deviation):
    return torch.full((len(grid),), deviation, dtype=torch.float64)


@pytest.mark.parametrize("right", range(len(RATES)))
def test_clean_votes_choose_the_largest_rate_that_is_wanted(right):
    means = torch.tensor([1.0] * (right + 1) + [0.0] * (len(RATES) - right - 1), dtype=torch.float64)
    assert chosen(means, doubt(RATES, CERTAIN)) == pytest.approx(RATES[right])


@pytest.mark.parametrize("length", [0.02, 0.7, 30.0])
def test_clean_votes_find_a_clip_within_a_quarter_of_a_decade_of_the_updates(length):
    means = (length > torch.tensor(RADII)).double()
    assert abs(math.log10(located(means, doubt(RADII, CERTAIN)) / length)) <= 0.25 + 1e-9


def test_votes_that_are_all_noise_leave_what_is_usual():
    assert chosen(torch.ones(len(RATES)), doubt(RATES, NOISE)) == pytest.approx(USUAL)
    assert located(torch.zeros(len(RADII)), doubt(RADII, NOISE)) == pytest.approx(1.0)


@pytest.mark.parametrize("mean", [-1e300, 1e300, math.nan, math.inf])
def test_the_rate_never_leaves_the_public_grid(mean):
    rate = chosen(torch.full((len(RATES),), mean, dtype=torch.float64), doubt(RATES, 1.0))
    assert RATES[0] * (1 - 1e-12) <= rate <= RATES[-1] * (1 + 1e-12)


def test_a_client_wants_more_only_where_its_loss_fell_by_no_more_than_half_and_no_less_than_at_the_rate_below():
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0])
    after = torch.tensor([0.8, 1.0, 0.8, 0.4, math.nan])
    smaller = torch.tensor([0.9, 1.1, 0.7, 0.9, 0.9])
    assert wants_more(before, after, smaller).tolist() == [True, False, False, False, False]


def test_the_rate_stays_while_nine_of_ten_are_helped_and_falls_while_they_are_not():
    assert watched(0.3, 1.0, 1.0 - MOST_HARMED) == (0.3, pytest.approx(0.97))
    rate, mean = 0.3, 1.0
    for _ in range(20):
        below, mean = watched(rate, mean, 0.0)
        assert rate * math.exp(-FALL) < below <= rate
        rate = below
    assert rate < 0.3 * 1e-3


@pytest.mark.parametrize("adjacency", ["replace-one", "add-remove"])
def test_the_probe_costs_no_more_than_its_share_of_the_run(adjacency):
    rounds, mu = 50, CentralGaussian(1.0, 5.0, adjacency).event(Sampling()).mu
    noises = [probe_noise(mu, rounds, share) for share in (RATE_SHARE, CLIP_SHARE)]
    costs = [event.mu**2 for event in Probe(*noises, adjacency).events(Sampling())]
    for cost, share in zip(costs, (RATE_SHARE, CLIP_SHARE), strict=True):
        assert cost <= share * rounds * mu**2 * (1 + 1e-12)
    assert sum(costs) > 0
