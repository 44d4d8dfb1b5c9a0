import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp.core.clipping import clip
from dpfedexp.core.noise.streams import Streams
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian
from dpfedexp.mechanisms.base import lift

CLIENTS = torch.arange(1)


def exact_norm(row):
    return math.sqrt(math.fsum(float(v) ** 2 for v in row))


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 30),
    st.floats(0.0, 3.0),
    st.floats(1e-3, 1e3),
    st.sampled_from([torch.float32, torch.float64]),
    st.integers(0, 2**31),
)
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


def rows(count=400, d=20, radius=0.3):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, d, generator=generator)
    lengths = torch.linspace(0.0, 1.4, count)[:, None] * radius
    return clip(x / x.norm(dim=1, keepdim=True) * lengths, radius)


@pytest.mark.parametrize("setting", ["central", "local"])
def test_free_numerator_is_unbiased_with_the_noise_of_one_coordinate(setting):
    """Its sd is C·(the noise of the mean per coordinate): 5C²/M central, 0.7C²/√M local."""
    radius, repeats = 0.3, 3000
    clipped = rows(radius=radius)
    m = len(clipped.vectors)
    ids = torch.arange(m)
    truth = float(clipped.vectors.double().square().sum(1).mean())
    mechanism = (
        CentralGaussian(radius, 5.0, numerator="free")
        if setting == "central"
        else LocalGaussian(radius, 0.7, numerator="free")
    )
    expected_sd = 5 * radius**2 / m if setting == "central" else 0.7 * radius**2 / math.sqrt(m)
    repeats = repeats if setting == "central" else 300
    drawn = []
    for trial in range(repeats):
        streams = Streams(trial)
        sums = mechanism.collect(mechanism.randomize(clipped, ids, streams.at("local noise", 1)))
        release = mechanism.release(sums, m, streams.at("central noise", 1), streams.at("scalar", 1))
        drawn.append(radius**2 - radius * release.statistic)
    drawn = torch.tensor(drawn, dtype=torch.float64)
    # Five standard errors of the mean; the sd of a sample of n has a relative error of 1/sqrt(2n), five of those.
    assert abs(float(drawn.mean()) - truth) < 5 * expected_sd / math.sqrt(repeats) + 1e-6 * radius**2
    assert float(drawn.std()) == pytest.approx(expected_sd, rel=5 / math.sqrt(2 * repeats))


def test_free_noise_is_far_below_the_papers_at_its_own_settings():
    """NOTES: 5C²/M against dσ²/M = 126C²/M at d = 5046."""
    m, d, z, radius = 1000, 5046, 5.0, 0.3
    paper = d * (z * radius / math.sqrt(m)) ** 2 / m
    assert paper / (z * radius * radius / m) == pytest.approx(126.15 / 5, rel=1e-3)
