"""PrivUnit and ScalarDP: unbiased, with the exact law, ratio and constants, also on the lattice."""

import math

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats

from dpfedexp.accounting import Sampling
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import PrivUnit, Report
from dpfedexp.mechanisms.privunit import ScalarDP, best_split, direction, sample_direction, sample_height
from tests.sizes import sized

from .one_round import reports


@pytest.mark.parametrize("gamma", sized(["exact"], ["exact", "paper", "optimal"]))
@pytest.mark.parametrize("d", [2, 3, 237])
def test_c_is_unbiased(d, gamma):
    """Along Δ and along a fixed other direction, within five standard errors of the mean."""
    clip_radius = 0.3
    mechanism = PrivUnit(clip_radius, d, gamma=gamma)
    delta = torch.randn(1, d, generator=torch.Generator().manual_seed(d))
    delta = delta / delta.norm() * 0.2
    count = min(sized(50_000, 200_000), sized(10_000_000, 40_000_000) // d)
    _, c = mechanism.reconstruct(reports(mechanism, delta.expand(count, -1).clone()))
    other = torch.randn(d, generator=torch.Generator().manual_seed(1))
    other = other - (other @ delta[0]) * delta[0] / delta[0].square().sum()
    for probe, expected in ((delta[0] / delta.norm(), 0.2), (other / other.norm(), 0.0)):
        along = (c @ probe).double()
        assert abs(float(along.mean()) - expected) < 5 * float(along.std()) / math.sqrt(count)


def test_the_log_ratio_of_the_two_most_telling_reports_is_the_epsilon_of_a_report():
    mechanism = PrivUnit(0.3, 3)
    here = torch.tensor([[0.3, 0.0, 0.0]])
    up, levels = here / 0.3, torch.tensor([[mechanism.scalar.k], [0], [1]])
    seen = torch.cat([torch.cat([up, -up, up]), levels], dim=1).double().numpy()
    whole, direction_only = mechanism.event(Sampling()).epsilon, mechanism.direction.epsilon
    assert mechanism.log_ratio(seen, here, -here) == pytest.approx([whole, -whole, direction_only], rel=1e-12)
    with pytest.raises(InputError, match="the report has no level"):
        mechanism.collect(Report(up))


@pytest.mark.parametrize(("d", "epsilon1"), [(2, 2.0), (3, 0.5), (237, 6.0), (5046, 2.0), (10**7, 0.5)])
def test_log_m_agrees_with_fifty_digits(d, epsilon1):
    """m = E⟨V,u⟩, evaluated from p, γ and q at 50 digits; the printed formula overflows near d = 1000."""
    constants = direction(d, 2.0, epsilon1)
    with mpmath.workdps(50):
        half = mpmath.mpf(d - 1) / 2
        gamma, p = mpmath.mpf(constants.gamma), mpmath.mpf(constants.p)
        q = mpmath.betainc(half, mpmath.mpf(1) / 2, 0, 1 - gamma**2, regularized=True) / 2
        cap_mean = (1 - gamma**2) ** half / ((d - 1) * mpmath.beta(mpmath.mpf(1) / 2, half))
        log_m = mpmath.log(cap_mean * (p / q - (1 - p) / (1 - q)))
    assert abs(constants.log_m - float(log_m)) < 1e-9


@pytest.mark.parametrize("d", [2, 237, 10**6])
@pytest.mark.parametrize("gamma", ["exact", "optimal"])
@pytest.mark.parametrize(("epsilon0", "epsilon1"), [(0.5, 4.0), (4.0, 1.0)])
def test_the_exact_density_ratio_is_within_epsilon(d, gamma, epsilon0, epsilon1):
    """The density of V is constant inside the cap and outside it; its mass is computed from γ, not taken from q."""
    constants = direction(d, epsilon0, epsilon1, gamma)
    mass = 0.5 * stats.beta.sf(constants.gamma**2, 0.5, (d - 1) / 2)
    ratio = math.log(constants.p / mass) - math.log((1 - constants.p) / (1 - mass))
    # The inverse incomplete beta function is good to about 1e-12; a looser rule would show at 1e-2.
    assert ratio <= epsilon0 + epsilon1 + 1e-9
    assert ratio == pytest.approx(epsilon0 + epsilon1, abs=1e-9)
    assert constants.epsilon == pytest.approx(ratio, abs=1e-9)


def test_the_papers_gamma_wastes_budget_in_high_dimension_and_is_unsound_in_two():
    """NOTES: the true ε is 5.586 at ε₀ = ε₁ = ε₂ = 2, and the exact γ is 1.235 times the paper's."""
    paper, exact = direction(5046, 2.0, 2.0, "paper"), direction(5046, 2.0, 2.0)
    assert paper.epsilon + 2.0 == pytest.approx(5.586, abs=1e-3)
    assert exact.gamma / paper.gamma == pytest.approx(1.235, abs=1e-3)
    event = PrivUnit(1.0, 2, gamma="paper").event(Sampling())
    assert event.epsilon > event.nominal + 0.1, "and the event says so"
    assert PrivUnit(1.0, 2).event(Sampling()).epsilon == pytest.approx(6.0, abs=1e-9)


def test_exact_gamma_and_optimal_split_cut_the_variance_as_in_the_notes():
    """Variance of the direction at ε₀+ε₁ = 4, against the paper's γ: 1.28 and 1.41 times less."""
    paper, exact, optimal = (direction(237, 2.0, 2.0, rule) for rule in ("paper", "exact", "optimal"))
    variance = [1 / c.m**2 - 1 for c in (paper, exact, optimal)]
    assert variance[0] / variance[1] == pytest.approx(1.28, abs=0.02)
    assert variance[0] / variance[2] == pytest.approx(1.41, abs=0.02)
    assert math.log(optimal.p / (1 - optimal.p)) == pytest.approx(1.34, abs=0.02)


@pytest.mark.parametrize("d", [2, 3, 237])
def test_heights_have_the_exact_distribution(d):
    """Kolmogorov–Smirnov against the mixture of the two truncated laws of ⟨V,u⟩."""
    constants = direction(d, 2.0, 2.0)
    uniform = torch.rand(100_000, 2, generator=torch.Generator().manual_seed(d), dtype=torch.float64)
    drawn = sample_height(constants, uniform).numpy()

    def whole(t):
        return 0.5 * (1 + np.sign(t) * stats.beta.cdf(t * t, 0.5, (d - 1) / 2))

    def mixture(t):
        low = whole(constants.gamma)
        inside = np.clip((whole(t) - low) / (1 - low), 0, 1)
        outside = np.clip(whole(t) / low, 0, 1)
        return constants.p * inside + (1 - constants.p) * outside

    assert stats.kstest(drawn, mixture).pvalue > 1e-6


@pytest.mark.parametrize(("d", "count"), [(2, 20), (237, 20), (100_000, 20), (10**7, 1)])
def test_v_is_a_unit_vector_at_the_drawn_height(d, count):
    unit = torch.zeros(count, d)
    unit[:, 0] = 1.0
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(count, 2, generator=generator, dtype=torch.float64)
    constants = direction(d, 2.0, 2.0)
    v = sample_direction(unit, constants, torch.randn(count, d, generator=generator), uniform)
    assert torch.allclose(v.double().norm(dim=1), torch.ones(count, dtype=torch.float64), atol=1e-6)
    assert torch.allclose(v[:, 0].double(), sample_height(constants, uniform), atol=1e-6)


def test_a_zero_update_has_mean_zero_and_changes_nothing_that_its_neighbors_draw():
    mechanism = PrivUnit(0.3, 10)
    _, c = mechanism.reconstruct(reports(mechanism, torch.zeros(20_000, 10)))
    assert bool(torch.isfinite(c).all())
    assert torch.all(c.double().mean(0).abs() < 5 * c.double().std(0) / math.sqrt(20_000))
    rows = torch.randn(4, 10, generator=torch.Generator().manual_seed(0))
    alone, together = (reports(mechanism, one) for one in (rows, torch.cat([rows, torch.zeros(1, 10)])))
    assert torch.equal(alone.vector, together.vector[:4])
    assert torch.equal(alone.level, together.level[:4])


def variance_at_the_clip(mechanism):
    """Var(c)/C² at r = C, exactly: E[r̂²]/m² − 1 from the law of Ĵ."""
    e, k = math.exp(mechanism.epsilon2), mechanism.scalar.k
    levels = torch.arange(k + 1)
    weights = torch.where(levels == k, e / (e + k), 1 / (e + k)).double()
    return float((weights * mechanism.scalar.magnitude(levels).square()).sum()) / mechanism.direction.m**2 - 1


@pytest.mark.parametrize(("epsilon", "dimension"), [(2.0, 5), (6.0, 20), (12.0, 237)])
def test_no_share_for_the_norm_has_less_variance_than_the_best_split(epsilon, dimension):
    best = variance_at_the_clip(PrivUnit(1.0, dimension, *best_split(epsilon, dimension)))
    for share in range(2, 81):
        epsilon2 = 0.01 * share * epsilon
        half = (epsilon - epsilon2) / 2
        other = variance_at_the_clip(PrivUnit(1.0, dimension, half, half, epsilon2, "optimal"))
        assert best <= other * (1 + 1e-9), "up to rounding: these are the shares that were compared"


def test_the_best_split_spends_all_of_epsilon_and_no_more():
    for epsilon in (0.5, 6.0, 20.0, 200.0):
        split = best_split(epsilon, 50)
        assert sum(split) == pytest.approx(epsilon, rel=1e-12)
        assert split[2] < 25.0
        if epsilon <= 20.0:
            event = PrivUnit(1.0, 50, *split).event(Sampling())
            assert event.epsilon == pytest.approx(epsilon, abs=1e-9)
            assert event.nominal == pytest.approx(epsilon, abs=1e-12)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: direction(1, 2.0, 2.0), "2 parameters"),
        (lambda: direction(10, 0.0, 2.0), "epsilon0"),
        (lambda: direction(10, 2.0, -1.0), "epsilon1"),
        (lambda: direction(10, 2.0, 2.0, "x"), "gamma"),
        (lambda: best_split(0.0, 50), "epsilon is"),
        (lambda: best_split(500.5, 50), "epsilon is"),
        (lambda: best_split(500.0, 50), r"epsilon is 500\.0 a round, which leaves nothing random"),
        (lambda: ScalarDP(0.0, 1.0), "epsilon2"),
        (lambda: ScalarDP(60.001, 1.0), "epsilon2"),
    ],
)
def test_wrong_settings_are_refused_by_name(call, words):
    assert ScalarDP(60.0, 1.0).epsilon2 == 60.0
    with pytest.raises(InputError, match=words):
        call()


@pytest.mark.parametrize(("dimension", "exponent"), [(4, -13), (16, -14), (17, -15), (5000, -19)])
def test_the_step_is_two_to_the_minus_twelve_of_the_power_of_two_below_a_typical_coordinate(dimension, exponent):
    assert PrivUnit(1.0, dimension).secure().step == 2.0**exponent
    assert 2.0**-13 < PrivUnit(1.0, dimension).secure().step * dimension**0.5 <= 2.0**-12


def levels(scalar, r, count=400_000, seed=0):
    uniform = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scalar.randomize(torch.full((count,), r, dtype=torch.float64), uniform)


@pytest.mark.parametrize("fraction", [0.0, 0.13, 0.4, 1.0])
@pytest.mark.parametrize("epsilon2", [0.5, 2.0, 5.0])
def test_magnitude_is_unbiased_and_squared_norm_biased_low_by_exactly_the_rounding_term(epsilon2, fraction):
    """E[ŝ] = r² − (C/k)²(f − ½)²: 1/(1+c₂) in place of 1/(1+c₁), the proof's misprint, would be far off."""
    clip = 0.3
    scalar = ScalarDP(epsilon2, clip)
    r = fraction * clip
    f = math.modf(scalar.k * fraction)[0]
    r_hat = scalar.magnitude(levels(scalar, r))
    squared = r * r - (clip / scalar.k) ** 2 * (f - 0.5) ** 2
    for drawn, expected in ((r_hat, r), (scalar.squared_norm(r_hat), squared)):
        assert abs(float(drawn.mean()) - expected) < 5 * float(drawn.std()) / math.sqrt(len(drawn))


@pytest.mark.parametrize("epsilon2", [0.5, 2.0, 5.0])
def test_randomized_response_has_the_exact_ratio(epsilon2):
    scalar = ScalarDP(epsilon2, 1.0)
    counts = torch.bincount(levels(scalar, 0.0), minlength=scalar.k + 1).double()
    keep = counts[0] / counts.sum()
    expected = math.exp(epsilon2) / (math.exp(epsilon2) + scalar.k)
    assert float(keep) == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / 400_000))
    others = counts[1:] / counts.sum()
    share = (1 - expected) / scalar.k
    assert torch.allclose(others, torch.full_like(others, share), atol=5 * math.sqrt(share / 400_000))
    assert int(levels(scalar, 1.0 + 1e-7, 10_000).max()) == scalar.k, "a norm above the clip by rounding"
