"""Clipping: the ball is kept in exact arithmetic over the whole range of radii, and nothing leads out of that range."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dpfedexp import AdaptiveClip, InputError, dp_fedavg
from dpfedexp.core.clipping import BLOCK, INSIDE, LARGEST_CLIP, SMALLEST_CLIP, clip, quantile_for, row_norms
from dpfedexp.mechanisms import CentralGaussian, Report
from dpfedexp.mechanisms.base import total

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


@pytest.mark.parametrize("radius", [1e-12, 1e-7, 0.3])
def test_a_row_of_the_largest_floats_ends_inside_the_ball(radius):
    """C/‖Δ̃‖ is subnormal in float32 here, where rounding it would overshoot by up to 40%."""
    largest = float(torch.finfo(torch.float32).max)
    rows = torch.full((12, 5046), 1.0) * torch.logspace(30, math.log10(largest) - 1e-6, 12)[:, None]
    for row in clip(rows, radius).vectors:
        assert square(row) <= Fraction(radius) ** 2


def test_a_row_inside_the_ball_is_left_as_it_is_and_one_outside_keeps_its_direction():
    rows = torch.randn(10, 7) * 0.01
    assert torch.equal(clip(rows, 1.0).vectors, rows)
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [3e12, 4e12]])
    clipped = clip(rows, 1.0)
    assert torch.allclose(clipped.vectors, torch.tensor([[0.6, 0.8], [0.3, 0.4], [0.6, 0.8]]), atol=1e-6)
    assert clipped.within.tolist() == [False, True, False]
    assert rows[0].tolist() == [3.0, 4.0], "only with reuse are the rows overwritten"
    assert torch.equal(clip(rows, 1.0, reuse=True).vectors, clipped.vectors)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e200])
def test_a_row_that_is_not_finite_or_whose_square_overflows_becomes_zero_and_the_others_stay(bad):
    rows = torch.ones(3, 4, dtype=torch.float64) * 0.1
    rows[1, 2] = bad
    out = clip(rows, 1.0).vectors
    assert torch.equal(out[1], torch.zeros(4, dtype=torch.float64))
    assert torch.equal(out[[0, 2]], rows[[0, 2]])


def test_adaptive_clip_moves_towards_the_quantile():
    adaptive = AdaptiveClip(initial=1.0)
    assert adaptive.update(1.0, noisy_fraction=1.0) < 1.0 < adaptive.update(1.0, noisy_fraction=0.0)
    assert adaptive.update(1.0, noisy_fraction=0.5) == 1.0
    assert adaptive.update(1.0, 0.0) == pytest.approx(math.exp(0.5 * 0.5))


def test_adaptive_clip_refuses_wrong_settings_by_name():
    wrong = [("initial", 0.0), ("rate", 0.0), ("count_noise", -1.0)]
    for name, value in (*wrong, *(("quantile", value) for value in ("aut", True, 0.0, 1.0, math.nan))):
        with pytest.raises(InputError, match=name):
            AdaptiveClip(**{name: value})


def test_the_quantile_falls_with_the_noise_and_is_a_number_once_it_is_settled():
    norms = [0.0, 0.01, 0.05, 0.25, 0.5, 1.0, 10.0, math.inf]
    quantiles = [quantile_for(norm) for norm in norms]
    assert quantiles == sorted(quantiles, reverse=True)
    assert (quantiles[0], quantiles[3], quantiles[-1]) == (0.9, 0.5, 0.2)
    auto = AdaptiveClip(quantile="auto")
    with pytest.raises(InputError, match="has no value yet"):
        auto.update(1.0, 0.5)
    assert auto.resolve(0.25, 0.05).quantile == 0.5
    assert auto.resolve(None, 0.05).quantile == 0.9
    assert AdaptiveClip(quantile=0.7).resolve(0.25, 0.05).quantile == 0.7


def test_noise_moves_an_adaptive_clip_by_at_most_a_tenth_in_a_round():
    assert [AdaptiveClip().resolve(1.0, noise).rate for noise in (0.0, 0.05, 0.2)] == [0.5] * 3
    assert AdaptiveClip().resolve(1.0, 1.6).rate == pytest.approx(0.1 / 1.6)
    assert AdaptiveClip(rate=0.01).resolve(1.0, 1.6).rate == 0.01


LONG = 3 * BLOCK + 17


def test_long_rows_have_the_norms_and_sums_of_exact_arithmetic_and_end_inside_the_ball():
    rows = torch.randn(3, LONG, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-20], [1.0], [1e20]])
    exact = [math.fsum(v * v for v in row) for row in rows.double().tolist()]
    assert row_norms(rows).tolist() == pytest.approx([math.sqrt(v) for v in exact], rel=1e-13)
    assert torch.equal(total(rows), rows.double().sum(0))
    rows = torch.randn(4, LONG, generator=torch.Generator().manual_seed(1))
    once = clip(rows, 0.3).vectors
    assert all(math.fsum(v * v for v in row) <= 0.3**2 for row in once.double().tolist())
    assert torch.equal(clip(once, 0.3).vectors, once)


class OnAnAccelerator(torch.Tensor):
    """Rows that say that they are not on the CPU, where they are."""

    device = property(lambda self: torch.device("cuda"))


@pytest.mark.parametrize("width", [1, 3, 4, 6, 8, 237])
def test_on_an_accelerator_every_row_begins_at_a_multiple_of_16_bytes_and_keeps_its_norm(width, monkeypatch):
    rows = torch.randn(5, width, generator=torch.Generator().manual_seed(width))
    plain, seen = torch.linalg.vector_norm, []

    def norm(x, **options):
        seen.append(x)
        return plain(x.as_subclass(torch.Tensor), **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", norm)
    shifted = torch.cat([torch.zeros(1), rows.flatten()])[1:].view(5, width)
    views = (rows, torch.cat([rows, rows], 1)[:, :width], shifted)
    for one in views:
        torch.testing.assert_close(row_norms(one.as_subclass(OnAnAccelerator)), plain(rows.double(), dim=1))
        assert seen[-1].shape[1] % 4 == 0
        assert seen[-1].is_contiguous()
        assert seen[-1].data_ptr() % 16 == 0
        assert (seen[-1].data_ptr() == one.data_ptr()) is (one is rows and width % 4 == 0), "a copy only where needed"
