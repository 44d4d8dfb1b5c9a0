"""How much noise the mean has, as a mechanism says from public numbers, is how much it has."""

import math

import pytest
import torch

from dpfedexp.core.clipping import clip
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.votes import within_clip
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit, Release
from tests.mechanisms.local_laplace import LocalLaplace

CLIP, M, D = 0.3, 50, 4000
DENOMINATOR = 80.0
"""Not M: a central sum is divided by what was declared, a local mean by who reported."""


def released(mechanism, rows, seed=0):
    streams = Streams(seed)
    clipped = clip(rows, mechanism.clip)
    sums = mechanism.collect(mechanism.randomize(clipped, torch.arange(len(rows)), streams.at("client", 1)))
    return mechanism.release(sums, DENOMINATOR, streams.at("noise", 1), streams.at("scalar", 1))


GAUSSIANS = [
    CentralGaussian(CLIP, 5.0),
    CentralGaussian(CLIP, 5.0, numerator="free"),
    CentralGaussian(CLIP, 2.0, numerator="paper", scalar_multiplier=3.0, votes=(within_clip(4.0),)),
    CentralGaussian(CLIP, 5.0).secure(),
    LocalGaussian(CLIP, 0.7),
    LocalGaussian(CLIP, 0.7, "free"),
    LocalGaussian(CLIP, 0.7).secure(),
]


@pytest.mark.parametrize("mechanism", GAUSSIANS, ids=lambda m: f"{type(m).__name__}-{m.numerator}")
def test_a_mean_of_nothing_has_the_variance_that_the_mechanism_says(mechanism):
    measured = float(released(mechanism, torch.zeros(M, D)).c_bar.double().square().mean())
    # The relative deviation of a mean of D squares is sqrt(2/D) = 0.022; 5.5 of them happen once in 10⁷.
    assert measured == pytest.approx(mechanism.noise_variance(DENOMINATOR, M), rel=5.5 * math.sqrt(2 / D))
    assert released(mechanism, torch.zeros(M, D)).variance == mechanism.noise_variance(DENOMINATOR, M)
    assert mechanism.noise_norm(D, DENOMINATOR, M) == pytest.approx(
        math.sqrt(D * mechanism.noise_variance(DENOMINATOR, M))
    )


def test_a_central_mean_is_divided_by_the_public_number_and_a_local_one_by_the_reports():
    assert CentralGaussian(0.5, 4.0).noise_variance(100.0, 7) == pytest.approx((4.0 * 0.5 / 100.0) ** 2)
    assert LocalGaussian(0.5, 4.0).noise_variance(100.0, 7) == pytest.approx((4.0 * 0.5) ** 2 / 7)
    assert LocalGaussian(0.5, 4.0).noise_variance(100.0, 0) == pytest.approx((4.0 * 0.5) ** 2)


def test_the_noise_follows_the_clip_in_force():
    adaptive = CentralGaussian(1.0, 5.0, votes=(within_clip(10.0),))
    assert adaptive.at_radius(0.1).noise_variance(100.0, 100) == pytest.approx(
        0.01 * adaptive.noise_variance(100.0, 100)
    )


def test_without_privacy_there_is_no_noise():
    assert NoPrivacy().noise_variance(10.0, 10) == 0.0
    assert NoPrivacy().noise_norm(7, 10.0, 10) == 0.0
    assert released(NoPrivacy(), torch.ones(M, 7)).variance == 0.0


@pytest.mark.parametrize("epsilon2", [0.5, 2.0, 5.0])
def test_privunits_noise_at_the_clip_is_what_it_says(epsilon2):
    mechanism, d, count = PrivUnit(CLIP, 40, epsilon2=epsilon2), 40, 40_000
    row = torch.zeros(d, dtype=torch.float64)
    row[3] = CLIP
    rows = row.expand(count, d).clone()
    report = mechanism.randomize(clip(rows, CLIP), torch.arange(count), Streams(1).at("client", 1))
    errors = (mechanism.estimate(report).double() - row).square().sum(1)
    # Clipping shortens the rows by 2⁻²², far below the mean's own deviation.
    deviation = float(errors.std()) / math.sqrt(count)
    assert float(errors.mean()) == pytest.approx(mechanism.noise_norm(d, 1.0, 1) ** 2, abs=5.5 * deviation)
    assert deviation < 0.02 * float(errors.mean())
    assert mechanism.noise_norm(d, 1.0, 100) == pytest.approx(mechanism.noise_norm(d, 1.0, 1) / 10)


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_a_release_of_privunit_has_no_more_noise_than_it_says_whatever_the_updates_lengths(share, secure):
    d, rounds = 40, 60
    mechanism = PrivUnit(CLIP, d).secure() if secure else PrivUnit(CLIP, d)
    rows = torch.zeros(400, d, dtype=torch.float64)
    rows[:, 3] = share * CLIP
    releases = [released(mechanism, rows, seed) for seed in range(rounds)]
    errors = torch.stack([release.c_bar.double() - rows[0] for release in releases]).square()
    # A mean of 2,400 squares of means of 400 reports deviates by √(2/2400) = 0.029 of itself; 5.5 of them.
    assert float(errors.mean()) < releases[0].variance * 1.16
    if share == 1.0:
        assert float(errors.mean()) > releases[0].variance * 0.84


def test_a_mechanism_whose_noise_follows_the_clients_lengths_says_no_variance():
    assert PrivUnit(CLIP, 40).noise_variance(10.0, 10) is None


def test_a_mechanism_that_says_nothing_about_its_noise_is_taken_at_its_word():
    unknown = LocalLaplace(1.0, 5, 1.0)
    assert unknown.noise_variance(10.0, 10) is None
    assert unknown.noise_norm(5, 10.0, 10) is None
    assert Release(torch.zeros(5), None, {}, 1.0).variance == math.inf
