"""The range of the clip: inside it the ball is kept in exact arithmetic, and nothing leads out of it."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpfedexp import AdaptiveClip, InputError, Sgd, cdp_fedexp, dp_fedavg, train
from dpfedexp.core.clipping import INSIDE, LARGEST_CLIP, SMALLEST_CLIP, clip
from dpfedexp.data import synthetic_regression
from dpfedexp.mechanisms import CentralGaussian, Report
from dpfedexp.models import linear_regression

ENDS = (SMALLEST_CLIP, LARGEST_CLIP)
LEAST = 2.0**-149
"""The smallest subnormal float32."""

radii = st.sampled_from(ENDS) | st.floats(SMALLEST_CLIP, LARGEST_CLIP)
numbers = st.floats(width=32) | st.sampled_from([LEAST, -LEAST, 2.0**-127, 3.4e38, math.nan, math.inf, -math.inf])


def square(row) -> Fraction:
    return sum((Fraction(v) ** 2 for v in row.double().tolist()), Fraction(0))


@settings(max_examples=250, deadline=None)
@given(st.lists(numbers, min_size=1, max_size=30), radii, st.sampled_from([torch.float32, torch.float64]))
@example([1.0] + [1.5 * 2.0**-86] * 29, SMALLEST_CLIP, torch.float32)
def test_the_ball_is_kept_in_exact_arithmetic_over_the_whole_range(values, radius, dtype):
    """The example's small products are subnormal, and all of them are rounded up."""
    once = clip(torch.tensor([values], dtype=dtype), radius).vectors
    assert square(once[0]) <= Fraction(radius) ** 2
    assert torch.equal(clip(once, radius).vectors, once)


@pytest.mark.parametrize("radius", ENDS)
def test_rows_just_inside_and_just_outside_the_ball_end_inside_it(radius):
    """Rows of 300 float32 numbers whose norms lie within 2⁻²⁰ of the radius, where every rounding counts."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(200, 300, generator=generator, dtype=torch.float64)
    near = 1.0 + (torch.rand(200, 1, generator=generator, dtype=torch.float64) - 0.5) * 2.0**-19
    rows = (rows / rows.norm(dim=1, keepdim=True) * near * radius).float()
    for row in clip(rows, radius).vectors:
        assert square(row) <= Fraction(radius) ** 2
    assert bool((rows.double().norm(dim=1) > radius * INSIDE).any())


@pytest.mark.parametrize("radius", ENDS)
@pytest.mark.parametrize("secure", [False, True, "strict"])
@pytest.mark.parametrize("numerator", [None, "free", "paper"])
def test_a_mechanism_keeps_its_own_radius_whatever_a_client_sends(radius, secure, numerator):
    scalar = 3.0 if numerator == "paper" else None
    mechanism = CentralGaussian(radius, 2.0, numerator=numerator, scalar_multiplier=scalar)
    if secure:
        mechanism = mechanism.secure(strict=secure == "strict")
    generator = torch.Generator().manual_seed(1)
    for row in (torch.randn(40, generator=generator) * 3e37, torch.full((40,), LEAST), torch.full((40,), math.nan)):
        sums = mechanism.collect(Report(row[None]))
        assert square(sums.vector) <= Fraction(radius) ** 2
        assert 0.0 <= float(sums.squares) <= radius**2


@pytest.mark.parametrize("radius", [0.0, -1.0, 1e-40, 2.0**-65, 2.0**65, math.nan, -math.inf])
def test_a_radius_outside_the_range_is_refused_by_everything_that_takes_one(radius):
    for make in (
        lambda: clip(torch.ones(1, 3), radius),
        lambda: AdaptiveClip(initial=radius),
        lambda: dp_fedavg(clip=radius, noise_multiplier=1.0),
        lambda: dp_fedavg(clip=radius, mechanism="privunit"),
        lambda: dp_fedavg(clip=radius, mechanism="none"),
        lambda: CentralGaussian(radius, 1.0).collect(Report(torch.ones(1, 3))),
    ):
        with pytest.raises(InputError, match=r"2\^-64 .* to 2\^64"):
            make()


def test_only_the_types_of_the_proof_are_clipped():
    with pytest.raises(InputError, match="bfloat16"):
        clip(torch.ones(1, 3, dtype=torch.bfloat16), 0.3)


@given(
    st.lists(st.floats(), max_size=30), st.floats(SMALLEST_CLIP, LARGEST_CLIP), st.floats(0, 1e300, exclude_min=True)
)
@example([-1e308, -1e308, 1e308], 1.0, 0.5)
@example([math.nan, math.inf, -math.inf], 1.0, 0.5)
def test_no_sequence_of_counts_leads_the_adaptive_clip_out_of_the_range(fractions, initial, rate):
    adaptive = AdaptiveClip(initial=initial, rate=rate)
    radius = adaptive.initial
    for fraction in fractions:
        radius = adaptive.update(radius, fraction)
        assert SMALLEST_CLIP <= radius <= LARGEST_CLIP


@pytest.mark.parametrize("secure", [False, True])
def test_a_run_whose_count_is_noise_alone_stays_in_the_range_and_goes_on(secure):
    """Noise of 10⁶ on a count of 20: the noisy fraction is of the order of ±10⁴, and e to that overflows."""
    problem = synthetic_regression(20, 5, seed=1)
    done = train(
        linear_regression(5),
        problem.federation,
        cdp_fedexp(clip=AdaptiveClip(count_noise=1e6), noise_multiplier=1.0),
        local=Sgd(lr=0.02, steps=1),
        rounds=6,
        secure=secure,
        progress=False,
        device="cpu",
    )
    clips = [record["clip"] for record in done.history]
    assert len(clips) == 6
    assert set(clips[1:]) <= {SMALLEST_CLIP, LARGEST_CLIP}
