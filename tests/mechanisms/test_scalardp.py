import math

import pytest
import torch

from dpfedexp import InputError
from dpfedexp.mechanisms.privunit import ScalarDP


def levels(scalar, r, count=400_000, seed=0):
    uniform = torch.rand(count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return scalar.randomize(torch.full((count,), r, dtype=torch.float64), uniform)


def test_k_is_the_ceiling_of_the_exponential_not_the_exponential_of_the_ceiling():
    """The box's literal e^⌈ε₂/3⌉ would be 2.718 at ε₂ = 2."""
    assert ScalarDP(2.0, 1.0).k == 2
    assert ScalarDP(3.0, 1.0).k == 3
    assert ScalarDP(6.0, 1.0).k == 8
    assert ScalarDP(3 * math.log(4), 1.0).k == 4


@pytest.mark.parametrize("epsilon2", [0.5, 2.0, 5.0])
@pytest.mark.parametrize("fraction", [0.0, 0.13, 0.5, 0.77, 1.0])
def test_magnitude_is_unbiased(epsilon2, fraction):
    scalar = ScalarDP(epsilon2, 0.3)
    drawn = scalar.magnitude(levels(scalar, fraction * 0.3))
    assert abs(float(drawn.mean()) - fraction * 0.3) < 5 * float(drawn.std()) / math.sqrt(len(drawn))


@pytest.mark.parametrize("fraction", [0.0, 0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.9, 1.0])
@pytest.mark.parametrize("epsilon2", [1.0, 2.0, 4.0])
def test_squared_norm_is_biased_low_by_exactly_the_rounding_term(epsilon2, fraction):
    """E[ŝ] = r² − (C/k)²(f − ½)²: 1/(1+c₂) in place of 1/(1+c₁), the proof's misprint, would be far off."""
    clip = 0.3
    scalar = ScalarDP(epsilon2, clip)
    r = fraction * clip
    drawn = scalar.squared_norm(scalar.magnitude(levels(scalar, r)))
    f = math.modf(scalar.k * fraction)[0]
    expected = r * r - (clip / scalar.k) ** 2 * (f - 0.5) ** 2
    assert abs(float(drawn.mean()) - expected) < 5 * float(drawn.std()) / math.sqrt(len(drawn))


def test_a_clipped_client_is_biased_by_a_sixteenth_of_the_squared_clip_at_epsilon_two():
    scalar = ScalarDP(2.0, 1.0)
    drawn = scalar.squared_norm(scalar.magnitude(levels(scalar, 1.0)))
    assert float(drawn.mean()) == pytest.approx(1 - 1 / 16, abs=5 * float(drawn.std()) / math.sqrt(len(drawn)))


@pytest.mark.parametrize("epsilon2", [0.5, 2.0, 5.0])
def test_randomised_response_has_the_exact_ratio(epsilon2):
    scalar = ScalarDP(epsilon2, 1.0)
    counts = torch.bincount(levels(scalar, 0.0), minlength=scalar.k + 1).double()
    keep = counts[0] / counts.sum()
    expected = math.exp(epsilon2) / (math.exp(epsilon2) + scalar.k)
    assert float(keep) == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / 400_000))
    others = counts[1:] / counts.sum()
    share = (1 - expected) / scalar.k
    assert torch.allclose(others, torch.full_like(others, share), atol=5 * math.sqrt(share / 400_000))


def test_a_norm_above_the_clip_by_rounding_does_not_reach_a_level_above_k():
    scalar = ScalarDP(2.0, 0.1)
    assert int(levels(scalar, 0.1 * (1 + 1e-7), 10_000).max()) == scalar.k


@pytest.mark.parametrize("epsilon2", [0.5, 1.0, 2.0, 3.0, 6.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_level_comes_back_from_the_magnitude_alone(epsilon2, dtype):
    """The paper's integer test fails in float32; the nearest magnitude does not."""
    scalar = ScalarDP(epsilon2, 0.3)
    level = torch.arange(scalar.k + 1)
    magnitude = scalar.magnitude(level).abs().to(dtype) * (1 + 1e-6)
    assert torch.equal(scalar.recover_level(magnitude), level)


@pytest.mark.parametrize("epsilon2", [math.log(4), math.log(9)])
def test_recovery_is_an_error_where_two_levels_look_alike(epsilon2):
    with pytest.raises(InputError, match="epsilon2"):
        ScalarDP(epsilon2, 1.0).recover_level(torch.tensor([0.5]))


@pytest.mark.parametrize("wrong", [0.0, -1.0, 61.0])
def test_epsilon2_outside_its_range_is_refused(wrong):
    with pytest.raises(InputError, match="epsilon2"):
        ScalarDP(wrong, 1.0)
