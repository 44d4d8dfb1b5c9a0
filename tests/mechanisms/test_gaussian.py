import math

import pytest
import torch

from dpfedexp.accounting import Sampling
from dpfedexp.core.clipping import clip
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.votes import within_clip
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, Report

RADIUS = 0.3
CLIPPED = clip(torch.randn(50, 8, generator=torch.Generator().manual_seed(1)), RADIUS)
IDS = torch.arange(50)


def release(mechanism, seed=0, clipped=CLIPPED):
    streams = Streams(seed)
    sums = mechanism.collect(mechanism.randomize(clipped, IDS, streams.at("local noise", 1)))
    return mechanism.release(sums, len(IDS), streams.at("central noise", 1), streams.at("scalar", 1))


def test_no_privacy_releases_the_mean_and_the_mean_square():
    out = release(NoPrivacy())
    assert torch.allclose(out.c_bar, CLIPPED.vectors.double().mean(0))
    assert out.statistic == pytest.approx(float(CLIPPED.vectors.double().square().sum(1).mean()))


def test_central_noise_on_the_mean_has_standard_deviation_zc_over_m():
    mechanism = CentralGaussian(RADIUS, 5.0)
    mean = CLIPPED.vectors.double().mean(0)
    errors = torch.stack([release(mechanism, seed).c_bar - mean for seed in range(2000)])
    # 16,000 draws: the sd is known to 0.6 %, five of which are 3 %.
    assert float(errors.std()) == pytest.approx(5 * RADIUS / 50, rel=0.03)
    assert abs(float(errors.mean())) < 5 * 5 * RADIUS / 50 / math.sqrt(16000)


def test_local_noise_on_the_mean_has_standard_deviation_sigma_over_root_m():
    mechanism = LocalGaussian(RADIUS, 0.7)
    mean = CLIPPED.vectors.double().mean(0)
    errors = torch.stack([release(mechanism, seed).c_bar - mean for seed in range(500)])
    assert float(errors.std()) == pytest.approx(0.7 * RADIUS / math.sqrt(50), rel=0.06)


def test_the_papers_scalar_noise_is_a_standard_deviation_of_d_sigma_squared_over_m():
    """NOTES: σ_ξ = dσ²/M with σ = 5C/√M, on the mean."""
    d, m, z = 8, 50, 5.0
    mechanism = CentralGaussian(RADIUS, z, numerator="paper", scalar_multiplier=d * z * z / m)
    truth = float(CLIPPED.vectors.double().square().sum(1).mean())
    drawn = torch.tensor([release(mechanism, seed).statistic - truth for seed in range(4000)])
    sigma_squared = (z * RADIUS) ** 2 / m
    assert float(drawn.std()) == pytest.approx(d * sigma_squared / m, rel=0.06)


def test_vector_and_scalar_noise_are_independent():
    """A shared stream would let the noise be subtracted out: the correlation over runs must vanish."""
    mechanism = CentralGaussian(RADIUS, 5.0, numerator="paper", scalar_multiplier=4.0)
    pairs = torch.tensor([[float(r.c_bar[0]), r.statistic] for r in (release(mechanism, s) for s in range(3000))])
    assert abs(float(torch.corrcoef(pairs.T)[0, 1])) < 5 / math.sqrt(3000)


def test_ldp_gaussian_statistic_exceeds_the_truth_by_d_sigma_squared():
    mechanism = LocalGaussian(RADIUS, 0.7, numerator="paper")
    truth = float(CLIPPED.vectors.double().square().sum(1).mean())
    drawn = torch.tensor([release(mechanism, seed).statistic for seed in range(500)], dtype=torch.float64)
    energy = 8 * (0.7 * RADIUS) ** 2
    assert float(drawn.mean()) - truth == pytest.approx(energy, rel=0.03)


@pytest.mark.parametrize("numerator", [None, "free", "paper"])
def test_the_server_clips_again_what_a_client_did_not(numerator):
    mechanism = CentralGaussian(RADIUS, 5.0, numerator=numerator, scalar_multiplier=1.0)
    hostile = torch.full((1, mechanism.width(8)), 1e12)
    hostile_sums = mechanism.collect(Report(hostile))
    assert float(hostile_sums.vector.norm()) <= RADIUS
    assert float(hostile_sums.squares) <= RADIUS**2


def test_a_report_of_nan_adds_nothing():
    sums = CentralGaussian(RADIUS, 5.0).collect(Report(torch.full((1, 8), math.nan)))
    assert torch.equal(sums.vector, torch.zeros(8, dtype=torch.float64))


def test_sums_of_chunks_add_to_the_sums_of_all():
    mechanism = LocalGaussian(RADIUS, 0.7, numerator="paper")
    noise = Streams(3).at("local noise", 1)
    whole = mechanism.collect(mechanism.randomize(CLIPPED, IDS, noise))
    parts = [
        mechanism.collect(mechanism.randomize(clip(CLIPPED.vectors[i], RADIUS), IDS[i], noise))
        for i in (slice(0, 7), slice(7, 50))
    ]
    total = parts[0] + parts[1]
    # The same float32 rows, added in another order in double precision.
    assert torch.allclose(total.vector, whole.vector, rtol=1e-6, atol=1e-6)
    assert float(total.squares) == pytest.approx(float(whole.squares), rel=1e-6)
    assert total.count == whole.count == 50


def test_the_count_of_adaptive_clipping_is_centred_and_noisy():
    mechanism = CentralGaussian(RADIUS, 5.0, votes=(within_clip(2.0),))
    truth = float(CLIPPED.within.double().mean())
    drawn = torch.tensor([release(mechanism, seed).within - truth for seed in range(3000)])
    assert abs(float(drawn.mean())) < 5 * 0.04 / math.sqrt(3000)
    assert float(drawn.std()) == pytest.approx(2.0 / 50, rel=0.07)


def test_events_read_the_mechanisms_own_fields():
    replace = CentralGaussian(RADIUS, 5.0).event(Sampling())
    add = CentralGaussian(RADIUS, 5.0, "add-remove").event(Sampling())
    assert replace.mu == pytest.approx(2 / 5)
    assert add.mu == pytest.approx(1 / 5)
    assert LocalGaussian(RADIUS, 0.7).event(Sampling("poisson", 0.1)).mu == pytest.approx(2 / 0.7)


def test_the_free_rule_charges_exactly_the_event_of_dp_fedavg():
    for sampling in (Sampling(), Sampling("poisson", 0.1), Sampling("fixed", 0.1)):
        assert CentralGaussian(RADIUS, 5.0, numerator="free").event(sampling) == CentralGaussian(RADIUS, 5.0).event(
            sampling
        )
    assert LocalGaussian(RADIUS, 0.7, "free").event(Sampling()) == LocalGaussian(RADIUS, 0.7).event(Sampling())


def test_the_event_of_adaptive_clipping_charges_its_count():
    """Andrew et al.: z⁻² = z_Δ⁻² + (2σ_b)⁻², in both adjacencies."""
    for adjacency, both in (("replace-one", 2.0), ("add-remove", 1.0)):
        event = CentralGaussian(RADIUS, 5.00626, adjacency, votes=(within_clip(50.0),)).event(Sampling())
        assert event.mu == pytest.approx(both / 5.0, rel=1e-5)
