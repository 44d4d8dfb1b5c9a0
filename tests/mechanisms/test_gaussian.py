"""Gaussian mechanisms, and the server side of every mechanism: what is summed and released, and how much noise is in it."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.accounting import Sampling
from dpfedexp.core import noise as noise_module
from dpfedexp.core.clipping import BLOCK, clip
from dpfedexp.core.noise import Streams
from dpfedexp.core.sums import Sums, within_clip_vote
from dpfedexp.errors import InputError
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit, Release
from dpfedexp.mechanisms.base import lift, total

from .local_laplace import LocalLaplace
from .one_round import collected, reports

RADIUS, M, D = 0.3, 50, 4000

DENOMINATOR = 80.0
"""Not M: a central sum is divided by what was declared, a local mean by who reported."""

CLIPPED = clip(torch.randn(M, 8, generator=torch.Generator().manual_seed(1)), RADIUS).vectors


def release(mechanism, updates, seed=0, denominator=DENOMINATOR):
    streams = Streams(seed)
    sums = collected(mechanism, updates, streams.at("local noise", 1))
    return mechanism.release(sums, denominator, streams.at("central noise", 1), streams.at("scalar", 1))


def test_no_privacy_releases_the_mean_and_the_mean_square():
    out = release(NoPrivacy(), CLIPPED)
    assert torch.allclose(out.c_bar, CLIPPED.double().mean(0))
    assert out.statistic == pytest.approx(float(CLIPPED.double().square().sum(1).mean()))
    assert out.variance == NoPrivacy().noise_variance(10.0, 10) == NoPrivacy().noise_norm(7, 10.0, 10) == 0.0


def test_ldp_gaussian_statistic_exceeds_the_truth_by_d_sigma_squared():
    mechanism = LocalGaussian(RADIUS, 0.7, numerator="paper")
    truth = float(CLIPPED.double().square().sum(1).mean())
    drawn = torch.tensor([release(mechanism, CLIPPED, seed).statistic for seed in range(500)], dtype=torch.float64)
    energy = 8 * (0.7 * RADIUS) ** 2
    assert float(drawn.mean()) - truth == pytest.approx(energy, rel=0.03)


def test_the_free_rule_charges_exactly_the_event_of_dp_fedavg():
    for sampling in (Sampling(), Sampling("poisson", 0.1), Sampling("fixed", 0.1)):
        for kind in (CentralGaussian, LocalGaussian):
            assert kind(RADIUS, 5.0, numerator="free").event(sampling) == kind(RADIUS, 5.0).event(sampling)


def exact_norm(row):
    return math.sqrt(math.fsum(v * v for v in row.double().tolist()))


FLOATS = st.sampled_from([torch.float32, torch.float64])


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 30), st.floats(0.0, 3.0), st.floats(1e-3, 1e3), FLOATS, st.integers(0, 2**31))
def test_lifted_norm_never_exceeds_the_clip(d, length, radius, dtype, seed):
    direction = torch.randn(1, d, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    delta = clip(direction / direction.norm() * length * radius, radius).vectors
    assert exact_norm(lift(delta, radius)[0]) <= radius


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tiny", [0.0, 1e-30, 1e-12, 1e-8, 1e-5, 1e-4, 1e-3])
def test_lifted_norm_holds_where_rounding_is_worst(dtype, tiny):
    """Near ‖Δ‖ = 0 the last coordinate rounds to C itself; near ‖Δ‖ = C the update does."""
    for norm in (tiny, 1.0 - tiny):
        delta = clip(torch.full((1, 4), norm / 2, dtype=dtype), 1.0).vectors
        assert exact_norm(lift(delta, 1.0)[0]) <= 1.0


@pytest.mark.parametrize("setting", ["central", "local"])
def test_free_numerator_is_unbiased_with_the_noise_of_one_coordinate(setting):
    """Its sd is C·(the noise of the mean per coordinate): 5C²/M central, 0.7C²/√M local."""
    radius, m, repeats = 0.3, 400, 100
    x = torch.randn(m, 20, generator=torch.Generator().manual_seed(0))
    clipped = clip(x / x.norm(dim=1, keepdim=True) * torch.linspace(0.0, 1.4, m)[:, None] * radius, radius).vectors
    truth = float(clipped.double().square().sum(1).mean())
    kind, z = (CentralGaussian, 5.0) if setting == "central" else (LocalGaussian, 0.7)
    mechanism = kind(radius, z, numerator="free")
    expected_sd = z * radius**2 / (m if setting == "central" else math.sqrt(m))
    drawn = [radius**2 - radius * release(mechanism, clipped, trial, m).statistic for trial in range(repeats)]
    drawn = torch.tensor(drawn, dtype=torch.float64)
    # Five standard errors of the mean; the sd of a sample of n has a relative error of 1/sqrt(2n), five of those.
    assert abs(float(drawn.mean()) - truth) < 5 * expected_sd / math.sqrt(repeats) + 1e-6 * radius**2
    assert float(drawn.std()) == pytest.approx(expected_sd, rel=5 / math.sqrt(2 * repeats))


@pytest.mark.parametrize("width", [BLOCK, BLOCK + 1, 2 * BLOCK + 3])
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_are_added_in_double_precision_however_wide_they_are(width, rows):
    given = torch.randn(rows, width, generator=torch.Generator().manual_seed(0))
    found = total(given)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, given.double().sum(0), rtol=1e-14, atol=1e-14)  # three doubles in another order


@pytest.mark.parametrize("mechanism", [PrivUnit(1.0, 3), LocalGaussian(1.0, 1.0, "paper")])
def test_a_local_release_is_the_mean_over_those_who_reported(mechanism):
    sums = Sums(torch.tensor([4.0, 8.0, 2.0]).double(), torch.tensor(6.0).double(), torch.zeros(0).double(), 4)
    done = mechanism.release(sums, 100.0, None, None)
    assert (done.c_bar.tolist(), done.statistic) == ([1.0, 2.0, 0.5], 1.5)
    empty = mechanism.release(Sums.zero(3), 100.0, None, None)
    assert empty.c_bar.tolist() == [0.0] * 3
    assert empty.statistic == 0.0
    # The free rule's coordinate is the last one and no part of the mean.
    sums = Sums(torch.tensor([4.0, 8.0, 2.0, 6.0]).double(), torch.tensor(0.0), torch.zeros(0), 4)
    local = LocalGaussian(1.0, 1.0, "free").release(sums, 100.0, None, None)
    assert (local.c_bar.tolist(), local.statistic) == ([1.0, 2.0, 0.5], 1.5)
    assert LocalGaussian(0.5, 4.0).noise_variance(100.0, 0) == pytest.approx((4.0 * 0.5) ** 2), "of no clients"


def test_strict_noise_without_opendp_is_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "opendp.prelude", None)
    noise_module._discrete.cache_clear()
    with pytest.raises(InputError, match="needs OpenDP"):
        noise_module.discrete_gaussian((2,), 3.0)


GAUSSIANS = [
    CentralGaussian(RADIUS, 5.0, numerator="free"),
    CentralGaussian(RADIUS, 2.0, numerator="paper", scalar_multiplier=3.0, votes=(within_clip_vote(4.0),)),
    CentralGaussian(RADIUS, 5.0).secure(),
    LocalGaussian(RADIUS, 0.7, "free"),
    LocalGaussian(RADIUS, 0.7).secure(),
]


@pytest.mark.parametrize("mechanism", GAUSSIANS, ids=lambda m: f"{type(m).__name__}-{m.numerator}")
def test_a_mean_of_nothing_has_the_variance_that_the_mechanism_says(mechanism):
    out, said = release(mechanism, torch.zeros(M, D)), mechanism.noise_variance(DENOMINATOR, M)
    # The relative deviation of a mean of D squares is sqrt(2/D) = 0.022; 5.5 of them happen once in 10⁷.
    assert float(out.c_bar.double().square().mean()) == pytest.approx(said, rel=5.5 * math.sqrt(2 / D))
    assert out.variance == said
    assert mechanism.noise_norm(D, DENOMINATOR, M) == pytest.approx(math.sqrt(D * said))


@pytest.mark.parametrize(("share", "epsilon2"), [(0.0, 2.0), (0.5, 2.0), *((1.0, one) for one in (0.5, 2.0, 5.0))])
def test_privunits_noise_is_what_it_says_at_the_clip_and_no_more_below(share, epsilon2):
    mechanism, d, count = PrivUnit(RADIUS, 40, epsilon2=epsilon2), 40, 40_000
    rows = torch.zeros(count, d, dtype=torch.float64)
    rows[:, 3] = share * RADIUS
    report, said = reports(mechanism, rows), mechanism.noise_norm(d, 1.0, 1)
    errors = (mechanism.estimate(report).double() - rows).square().sum(1)
    # Clipping shortens the rows by 2⁻²², far below the mean's own deviation.
    deviation = float(errors.std()) / math.sqrt(count)
    assert deviation < 0.02 * said**2
    assert float(errors.mean()) < said**2 + 5.5 * deviation
    assert share < 1.0 or float(errors.mean()) > said**2 - 5.5 * deviation
    assert mechanism.noise_norm(d, 1.0, 100) == pytest.approx(said / 10)
    released = mechanism.release(mechanism.collect(report), DENOMINATOR, None, None)
    assert released.variance == pytest.approx(said**2 / count / d)


def test_a_mechanism_that_says_nothing_about_its_noise_is_taken_at_its_word():
    assert PrivUnit(RADIUS, 40).noise_variance(10.0, 10) is None, "it follows the clients' lengths"
    unknown = LocalLaplace(1.0, 5, 1.0)
    assert unknown.noise_variance(10.0, 10) is None
    assert unknown.noise_norm(5, 10.0, 10) is None
    assert Release(torch.zeros(5), None, {}, 1.0).variance == math.inf


def test_one_clients_share_of_a_central_sum_is_bounded_by_the_clip():
    mechanism = CentralGaussian(RADIUS, 2.0)
    assert (mechanism.norm_bound(8), mechanism.square_bounds(8)) == (RADIUS, (0.0, RADIUS**2))
