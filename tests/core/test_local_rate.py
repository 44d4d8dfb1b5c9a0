"""The rate that votes say: right where they are clean, the usual one where they are noise, and lower only where most are harmed."""

import math

import pytest
import torch

from dpfedexp.core.local_rate import (
    PRIOR_RATE,
    RADII,
    RATES,
    SCALES,
    SHAKE,
    best_rates,
    best_scale,
    clip_from_votes,
    first_rate,
    grid_value,
    moves,
    nearest_radii,
    next_rate,
    rate_from_votes,
    rescaled,
    scale_rounds,
    shake_of,
)

CLEAN = 1e-6
MANY = 10**9
"""So many rows that a client may lose half of its loss and no more."""


@pytest.mark.parametrize("at", range(len(RATES)))
def test_a_client_finds_its_own_best_rate_wherever_it_is_on_the_grid(at):
    """The losses of two clients start at 1 and fall to ½ at a rate of their own; two decades above it they are large."""
    best = torch.tensor([RATES[at] * 1.1, RATES[at] * 0.9]).double().log10()

    def after(rates):
        distance = rates.double().log10() - best
        return torch.where(distance < 2, (0.5 + 0.1 * distance.square()).clamp_max(1.0), 100.0 * distance)

    for unit in (1.0, 4.0):
        many = torch.full((2,), MANY)
        found = best_rates(torch.full((2,), unit).double(), many, lambda rates, unit=unit: unit * after(rates))
        assert found.tolist() == [at + 1] * 2


def test_a_client_stops_where_its_loss_rises_or_falls_by_more_than_half_and_says_nothing_where_nothing_moves():
    before = torch.tensor([1.0, 1.0, 1.0, 1.0, -2.0, math.nan]).double()

    def after(rates):
        """Destroyed from 1 on, with a dead model at 100; by heart from 0.1 on; never moved; worse at any rate; a negative loss."""
        first = torch.where(rates < 0.9, 1.0 - 0.3 * rates, torch.where(rates < 50, 9.0, 0.6))
        second, fifth = 1.0 - 6.0 * rates[1].clamp_max(0.15), -2.0 - rates[4].clamp_max(0.09)
        return torch.stack([first[0], second, before[2], 1.0 + rates[3], fifth, before[5]])

    found = best_rates(before, torch.full((6,), MANY), after).tolist()
    # Bin 1 is 10⁻⁴, and a bin is half a decade.
    assert found[:4] == [8, 6, 0, 1]
    assert found[4] >= 7
    assert found[5] == 1


@pytest.mark.parametrize(("drop", "passing"), [(0.45, 3), (0.7, 2), (0.9, 1), (0.97, 0)])
def test_a_client_with_few_rows_may_lose_more_of_its_loss(drop, passing):
    """One row may lose 95% of its loss, nine rows 75%, very many rows half."""
    sizes = torch.tensor([1, 9, MANY])

    def after(rates):
        return 1.0 - drop * (rates > 0.05).double() - 1e-3 * rates.clamp_max(0.2)

    found = best_rates(torch.ones(3).double(), sizes, after)
    assert [RATES[place - 1] > 0.05 for place in found.tolist()] == [number < passing for number in range(3)]


def test_a_norm_stands_at_the_nearest_radius():
    norms = torch.tensor([0.0, 1e-9, 1.0, 1.7, 1.8, 1e9, math.inf, math.nan])
    assert nearest_radii(norms).tolist() == [1, 1, 11, 11, 12, len(RADII), len(RADII), 0]


def heap(bins, at, count=1.0):
    return count * (torch.arange(bins) == at).double()


@pytest.mark.parametrize("at", range(len(RATES)))
def test_a_clean_histogram_chooses_the_rate_the_clip_and_the_factor_at_which_the_clients_stand(at):
    assert rate_from_votes(heap(len(RATES), at), CLEAN) == pytest.approx(RATES[at], rel=0.4)
    assert at not in range(3, 10) or rate_from_votes(heap(len(RATES), at), CLEAN) == pytest.approx(RATES[at], rel=0.06)
    assert clip_from_votes(heap(len(RADII), at), CLEAN) == pytest.approx(RADII[at], rel=0.5)
    if 0 < at < len(SCALES) - 1:
        assert rescaled(heap(len(SCALES), at), CLEAN) == pytest.approx(SCALES[at], rel=0.3)


@pytest.mark.parametrize("other", [0, 10, 12])
def test_a_second_smaller_heap_moves_nothing(other):
    both = heap(len(RATES), 5, 0.67) + heap(len(RATES), other, 0.33)
    assert rate_from_votes(both, 0.02) == pytest.approx(RATES[5], rel=0.1)


@pytest.mark.parametrize("answering", [0.4, 1.0])
def test_noise_of_a_tenth_of_the_clients_on_every_bin_leaves_the_rate_known_to_a_third_of_a_decade(answering):
    """A heap over three bins, of which some clients are missing, in 400 draws of the noise."""
    clean = answering * (heap(len(RATES), 5, 0.3) + heap(len(RATES), 6, 0.4) + heap(len(RATES), 7, 0.3))
    generator = torch.Generator().manual_seed(0)
    noisy = clean + torch.randn(400, len(RATES), generator=generator, dtype=torch.float64) / 10
    found = torch.tensor([2 * math.log10(rate_from_votes(row, 0.1) / RATES[6]) for row in noisy])
    # The prior is 0.6 bins above the heap and pulls a little where clients are missing.
    assert float(found.mean().abs()) < 0.3
    assert float(found.std()) < (0.4 if answering == 1.0 else 1.3)


@pytest.mark.parametrize("votes", [-50.0, 0.0, 0.5, 1.0, 50.0])
def test_votes_that_are_all_noise_leave_the_usual_rate_and_clip_and_the_factor_1(votes):
    rates, radii, factors = (torch.full((len(grid),), votes).double() for grid in (RATES, RADII, SCALES))
    assert rate_from_votes(rates, 1000.0) == pytest.approx(PRIOR_RATE, rel=0.03)
    assert clip_from_votes(radii, 1000.0) == pytest.approx(1.0, rel=0.03)
    assert rescaled(factors, 1000.0) == pytest.approx(1.0, rel=0.05)


def test_the_rate_stays_on_the_grid_whatever_the_votes_are():
    for votes in (-1e9, 1e9, math.nan, math.inf, -math.inf):
        assert RATES[0] <= rate_from_votes(torch.full((len(RATES),), votes, dtype=torch.float64), CLEAN) <= RATES[-1]
    votes = heap(len(RADII), 3)
    assert clip_from_votes(votes * math.inf, CLEAN) == clip_from_votes(votes, CLEAN), "∞ counts as 1, NaN as 0"
    assert grid_value(RATES, 0.5) == pytest.approx(10**-3.75)


def test_the_first_rate_moves_two_thirds_of_the_way_to_the_prior_by_at_most_a_bin_and_up_with_large_noise_only():
    rates = (PRIOR_RATE, PRIOR_RATE / 2, 2 * PRIOR_RATE, RATES[0], RATES[-1])
    moved = [PRIOR_RATE, PRIOR_RATE / 2 ** (1 / 3), PRIOR_RATE * 2 ** (1 / 3), RATES[1], RATES[-2]]
    assert [first_rate(rate, 2.0) for rate in rates] == pytest.approx(moved)
    assert [first_rate(rate, 0.9) for rate in (RATES[0], RATES[-1])] == pytest.approx([RATES[0], RATES[-2]])


def test_the_rate_is_rescaled_twice_with_large_noise_later_and_once_more_and_never_after_the_last_round():
    rounds = (1, 2, 3, 10, 50, 100)
    assert [scale_rounds(number, 1.0) for number in rounds] == [(), (1,), (1,), (1, 3), (3, 14), (6, 28)]
    assert [scale_rounds(number, 1.1) for number in rounds] == [(), (1,), (1, 2), (1, 3, 6), (6, 14, 28), (12, 28, 55)]


def test_clients_look_both_ways_of_a_public_noise_that_grows_with_the_factor_and_the_rounds_that_are_left():
    anchor, w = torch.zeros(1000), torch.ones(1000)
    one, other = moves(anchor, w, 0.5, 4.0)
    torch.testing.assert_close(one + other, 8.0 * w)
    assert float((one - other).std()) == pytest.approx(2 * 4.0 * 0.5, rel=0.1)
    assert torch.equal(moves(anchor, w, 0.5, 4.0)[0], one), "the same for every client"
    assert [shake_of(4.0, 9, n) for n in (0.0, 1.0, 4.0)] == pytest.approx([SHAKE * 6.0, SHAKE * 6.0, SHAKE * 3.0])
    assert shake_of(4.0, 0, 1.0) == 0.0


def test_a_client_votes_for_the_factor_with_its_lowest_loss_and_abstains_near_the_anchor():
    losses = torch.ones(len(SCALES), 4)
    losses[4, 0] = losses[11, 1] = losses[0, 2] = 0.0
    losses[:, 3] = math.nan
    assert best_scale(losses).tolist() == [5, 12, 0, 0]


def test_the_rate_falls_only_where_more_than_a_tenth_is_harmed():
    assert next_rate(0.3, 1.0, 1.0, 0.0) == (0.3, 1.0)
    assert next_rate(0.3, 0.95, 0.95, 0.0)[0] == 0.3
    rate, mean = next_rate(0.3, 1.0, 0.0, 0.0)
    assert mean == pytest.approx(0.7)
    assert rate == pytest.approx(0.3 * math.exp(-2 * 0.2))
    rates = [rate]
    for _ in range(20):
        rate, mean = next_rate(rate, mean, 0.5, 0.05)
        rates.append(rate)
    assert rates == sorted(rates, reverse=True)
    assert rate < 1e-4
    for _ in range(100):
        rate, mean = next_rate(rate, mean, 0.0, 0.0)
    assert rate == pytest.approx(1e-3 * RATES[0], rel=1e-12), "from which it could still recover"


@pytest.mark.parametrize("deviation", [0.05, 0.15, 1.0])
def test_noise_does_not_lower_a_rate_that_helps_everybody(deviation):
    """Over 100 rounds, in nearly all of 200 runs."""
    generator, ends = torch.Generator().manual_seed(1), []
    for _ in range(200):
        rate, mean = 1.0, 1.0
        for noise in torch.randn(100, generator=generator).tolist():
            rate, mean = next_rate(rate, mean, 1.0 + deviation * noise, deviation)
        ends.append(rate)
    assert sorted(ends)[20] > 0.7
