"""Subsampled rounds: against quadrature, dp-accounting and Opacus, and on settings that break accountants."""

import cmath
import itertools
import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from events_by_hand import central

from dpfedexp.accounting import GaussianEvent, Query, Sampling, compose, pld

REPLACE, ADD = dp_accounting.NeighboringRelation.REPLACE_ONE, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def hockey_stick(q: float, up: float, low: float, epsilon: float) -> float:
    """δ(ε) between (1−q)N(0,1) + qN(up,1) and (1−q)N(0,1) + qN(low,1), by the trapezoid rule on 400 000 points."""
    x = np.linspace(min(0, up, low) - 12, max(0, up, low) + 12, 400_001)

    def density(center: float) -> np.ndarray:
        return ((1 - q) * np.exp(-(x**2) / 2) + q * np.exp(-((x - center) ** 2) / 2)) / math.sqrt(2 * math.pi)

    return float(np.trapezoid(np.maximum(0.0, density(up) - math.exp(epsilon) * density(low)), x))


@pytest.mark.parametrize(
    ("q", "z", "adjacency"),
    [(0.01, 0.5, "replace-one"), (0.5, 0.7, "add-remove"), (0.9, 2.0, "replace-one"), (0.9, 2.0, "add-remove")],
)
def test_one_poisson_round_is_the_hockey_stick_of_its_dominating_pair(q, z, adjacency):
    delta, r = 1e-5, 1 / z
    epsilon = compose([(central(z, rate=q, adjacency=adjacency), 1)], delta).epsilon
    if adjacency == "replace-one":
        exact = hockey_stick(q, r, -r, epsilon)
    else:
        exact = max(hockey_stick(q, r, 0.0, epsilon), hockey_stick(q, 0.0, r, epsilon))
    assert exact <= delta * (1 + 1e-6)
    # Pessimistic rounding to a grid of 512 points per standard deviation moves δ by less than this.
    assert exact == pytest.approx(delta, rel=2e-3)


@pytest.mark.parametrize(("q", "r"), [(0.05, 2.0), (0.9, 2.0)])
def test_no_other_pair_of_clients_is_worse_than_the_opposite_one(q, r):
    """Replace-one under Poisson sampling, in the plane: other angles and norms have a smaller δ at every ε."""
    grid = np.linspace(-8 - r, 8 + r, 401)
    plane = grid + 1j * grid[:, None]

    def density(center: complex) -> np.ndarray:
        return (1 - q) * np.exp(-(abs(plane) ** 2) / 2) + q * np.exp(-(abs(plane - center) ** 2) / 2)

    def delta(one: np.ndarray, two: np.ndarray, epsilon: float) -> float:
        return float(np.maximum(0, one - math.exp(epsilon) * two).sum() / one.sum())

    upper, lower = density(r), density(-r)
    for angle, norm in itertools.product((0.0, 1.0, 2.0, 2.8, math.pi), (0.0, 0.5 * r, 0.9 * r)):
        other = density(cmath.rect(norm, angle))
        for epsilon in (0.05, 0.5, 1.5):
            worst = delta(upper, lower, epsilon) * (1 + 1e-3)  # the sum over a grid of 0.05 is good to 1e-3
            assert max(delta(upper, other, epsilon), delta(other, upper, epsilon)) <= worst


@pytest.mark.parametrize(
    ("z", "q", "rounds", "delta"),
    [(0.7, 0.01, 300, 1e-3), (1.0, 0.1, 30, 1e-5), (2.0, 1.0, 3, 1e-6), (4.0, 0.5, 100, 1e-8)],
)
@pytest.mark.filterwarnings("ignore")
def test_rdp_of_opacus_is_never_below_ours(z, q, rounds, delta):
    from opacus.accountants.analysis import rdp as opacus_rdp

    orders = [1 + x / 10 for x in range(6, 100, 4)] + list(range(11, 256, 16))
    curve = opacus_rdp.compute_rdp(q=q, noise_multiplier=z, steps=rounds, orders=orders)
    theirs, _ = opacus_rdp.get_privacy_spent(orders=orders, rdp=curve, delta=delta)
    assert theirs >= compose([(central(z, rate=q, adjacency="add-remove"), rounds)], delta).epsilon * (1 - 1e-9)


def test_a_thousand_poisson_rounds_have_their_known_epsilon():
    ours, name = pld.epsilon([(central(1.0, rate=0.1, adjacency="add-remove"), 1000)], 1e-5)
    assert (ours, name) == (pytest.approx(25.2, abs=0.02), pld.PLD)


@pytest.mark.parametrize(
    ("z", "q", "rounds", "adjacency"),
    [
        (1e-6, 1e-6, 10**6, "replace-one"),
        (1e-6, 0.999999, 10**6, "add-remove"),
        (0.01, 1e-3, 10**9, "replace-one"),
        (1e4, 1e-3, 10**9, "add-remove"),
        (1e4, 0.999999, 10**6, "replace-one"),
    ],
)
def test_extreme_settings_have_short_grids_and_do_not_raise(z, q, rounds, adjacency):
    event = central(z, rate=q, adjacency=adjacency)
    counts = [(pld.GaussianRound.of(event), rounds)]
    step, _ = pld._grid(counts)
    spread, reach = pld._loss_spread(counts[0][0])
    # The step is rounded down to a power of two, so a grid may be twice as long as its limit.
    assert reach / step <= 2 * pld._MAX_ROUND_GRID
    assert 16 * math.sqrt(rounds) * spread / step <= 2 * pld._MAX_TOTAL_GRID
    total = compose([(event, rounds)], 1e-5)
    assert math.isfinite(total.epsilon)
    assert total.accountant in (pld.PLD, pld.RDP, pld.UNAMPLIFIED)
    unamplified = compose([(central(z, adjacency=adjacency), rounds)], 1e-5).epsilon
    assert 0.0 <= total.epsilon <= unamplified * (1 + 1e-9)


def test_delta_below_the_rounding_of_the_convolution_falls_back_to_rdp():
    event = central(2.0, rate=0.1, adjacency="add-remove")
    total = compose([(event, 10**5)], 1e-12)
    assert total.accountant in (pld.RDP, pld.UNAMPLIFIED)
    assert total.epsilon > compose([(event, 10**5)], 1e-5).epsilon


def test_fixed_size_replace_one_is_rdp_without_replacement_with_the_full_sensitivity():
    z, q, rounds = 8.0, 0.05, 100
    accountant = rdp_privacy_accountant.RdpAccountant(list(range(2, 64)), REPLACE)
    # Replacing a client moves the sum by 2C: noise zC over that is z/2.
    event = dp_accounting.SampledWithoutReplacementDpEvent(1000, 50, dp_accounting.GaussianDpEvent(z / 2))
    accountant.compose(event, rounds)
    total = compose([(central(z, rate=q, kind="fixed"), rounds)], 1e-5)
    assert total.accountant == pld.RDP
    assert total.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)
    assert total.epsilon < compose([(central(z), rounds)], 1e-5).epsilon


def test_poisson_uses_the_joint_norm_of_all_queries():
    """The joint sensitivity of NOTES §4 does not survive Poisson sampling; the norm of one client's contribution does."""
    sampling = Sampling("poisson", 0.1)
    both = (Query("update", 1.0, 2.0, 5.0), Query("squared norms", 1.0, 1.0, 12.5))
    joint = GaussianEvent("central", "replace-one", both, sampling)
    equal = central(1 / math.hypot(1 / 5.0, 1 / 12.5), rate=0.1)
    assert compose([(joint, 50)], 1e-5).epsilon == pytest.approx(compose([(equal, 50)], 1e-5).epsilon, rel=1e-9)
    assert compose([(joint, 50)], 1e-5).epsilon > compose([(central(5.0, rate=0.1), 50)], 1e-5).epsilon


def test_rounds_with_changing_clips_are_one_distribution_which_composes_with_full_rounds():
    clips = np.random.default_rng(5).uniform(0.01, 10, 40)
    assert len({pld.GaussianRound.of(central(3.0, rate=0.1, clip=float(c))) for c in clips}) == 1
    changing = compose([(central(3.0, rate=0.1, clip=float(c)), 1) for c in clips], 1e-5).epsilon
    assert changing == pytest.approx(compose([(central(3.0, rate=0.1), 40)], 1e-5).epsilon, rel=1e-9)
    with_full = compose([(central(3.0, rate=0.1), 40), (central(10.0), 3)], 1e-5).epsilon
    halves = compose([(central(3.0, rate=0.1), 40)], 5e-6).epsilon + compose([(central(10.0), 3)], 5e-6).epsilon
    assert changing < with_full < halves
    for kind in ("poisson", "fixed"):
        full = GaussianEvent("central", "replace-one", central(5.0).queries, Sampling(kind, 1.0))
        assert pld.GaussianRound.of(full) == pld.GaussianRound.of(central(5.0))
    assert compose([(central(0.0, rate=0.1), 3)], 1e-5).epsilon == math.inf


@pytest.mark.parametrize(("adjacency", "shift"), [("replace-one", 2.0), ("add-remove", 1.0)])
def test_the_grid_of_a_round_in_which_nearly_everybody_takes_part_is_as_wide_as_a_full_rounds(adjacency, shift):
    nearly, full = (pld.GaussianRound(adjacency, kind, 1 - 1e-12, 0.5, shift * 0.5) for kind in ("poisson", "full"))
    assert pld._loss_spread(nearly)[0] == pytest.approx(pld._loss_spread(full)[0], rel=1e-9)


class Repeated:
    """Stands for a distribution and counts how many rounds it holds."""

    def __init__(self, rounds: int = 1) -> None:
        self.rounds = rounds

    def self_compose(self, n: int) -> "Repeated":
        assert n >= 1
        return Repeated(self.rounds * n)

    def compose(self, other: "Repeated", tail_mass_truncation: float) -> "Repeated":
        return Repeated(self.rounds + other.rounds)


@pytest.mark.parametrize("n", [1, 1023, 1024, 1025, 2047, 2048, 2049, 3072, 1_000_003])
def test_rounds_composed_in_two_stages_are_all_there(n):
    assert pld._repeat(Repeated(), n).rounds == n


@pytest.mark.parametrize("z", [0.7, 5.0])
def test_renyi_of_poisson_rounds_is_that_of_dp_accounting_at_their_noise(z):
    item = pld.GaussianRound.of(central(z, rate=0.1, adjacency="add-remove"))
    accountant = rdp_privacy_accountant.RdpAccountant(pld._ORDERS, ADD)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(z)), 100)
    # The round's shift is rounded up in its ninth digit or beyond.
    assert pld.rdp_epsilon([(item, 100)], 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-6)


@pytest.mark.parametrize(
    "item",
    [central(0.7), central(3.0, rate=0.1), central(3.0, rate=0.1, kind="fixed", adjacency="add-remove")],
    ids=["full", "poisson", "fixed"],
)
def test_renyi_of_rounds_that_nothing_amplifies_is_that_of_the_gaussian(item):
    """α·μ²/2, with μ the shift of the client that a fixed-size cohort pushes out counted in."""
    mu = 2.0 / item.queries[0].noise
    expected = np.array(pld._ORDERS) * mu**2 / 2.0
    assert pld._rdp_one_round(pld.GaussianRound.of(item)) == pytest.approx(expected, rel=1e-6)
