import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpfedexp import AdaptiveClip, InputError
from dpfedexp.core.clipping import BLOCK, clip, quantile_for, row_norms
from dpfedexp.mechanisms.base import total


def exact_norm(row: torch.Tensor) -> float:
    return math.sqrt(math.fsum(float(v) ** 2 for v in row))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=20),
    st.floats(1e-3, 1e3),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_clipped_norm_never_exceeds_the_radius(values, radius, dtype):
    row = clip(torch.tensor([values], dtype=dtype), radius).vectors[0]
    assert exact_norm(row) <= radius


@pytest.mark.parametrize("radius", [1e-12, 1e-7, 0.3])
def test_a_row_of_the_largest_floats_ends_inside_the_ball(radius):
    """C/‖Δ̃‖ is subnormal in float32 here, where rounding it would overshoot by up to 40%."""
    largest = float(torch.finfo(torch.float32).max)
    rows = torch.full((60, 5046), 1.0) * torch.logspace(30, math.log10(largest) - 1e-6, 60)[:, None]
    for row in clip(rows, radius).vectors:
        assert exact_norm(row) <= radius


def test_a_row_inside_the_ball_is_left_as_it_is():
    rows = torch.randn(10, 7) * 0.01
    assert torch.equal(clip(rows, 1.0).vectors, rows)


def test_a_row_outside_keeps_its_direction():
    row = torch.tensor([[3.0, 4.0]])
    assert torch.allclose(clip(row, 1.0).vectors, torch.tensor([[0.6, 0.8]]), atol=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_becomes_zero_and_the_others_stay(bad):
    rows = torch.ones(3, 4) * 0.1
    rows[1, 2] = bad
    out = clip(rows, 1.0).vectors
    assert torch.equal(out[1], torch.zeros(4))
    assert torch.equal(out[[0, 2]], rows[[0, 2]])


def test_huge_float64_rows_whose_square_overflows_become_zero():
    assert torch.equal(clip(torch.full((1, 2), 1e200, dtype=torch.float64), 1.0).vectors, torch.zeros(1, 2))


def test_an_update_of_1e12_is_scaled_to_the_radius():
    assert exact_norm(clip(torch.full((1, 100), 1e12), 0.3).vectors[0]) == pytest.approx(0.3, rel=1e-6)


def test_within_tells_which_rows_were_inside():
    assert clip(torch.tensor([[0.5], [2.0]]), 1.0).within.tolist() == [True, False]


def test_adaptive_clip_moves_towards_the_quantile():
    adaptive = AdaptiveClip(initial=1.0)
    assert adaptive.update(1.0, noisy_fraction=1.0) < 1.0 < adaptive.update(1.0, noisy_fraction=0.0)
    assert adaptive.update(1.0, noisy_fraction=0.5) == 1.0
    assert adaptive.update(1.0, 0.0) == pytest.approx(math.exp(0.5 * 0.5))


@pytest.mark.parametrize("wrong", [{"initial": 0.0}, {"quantile": 1.0}, {"rate": 0.0}, {"count_noise": -1.0}])
def test_adaptive_clip_refuses_wrong_settings_by_name(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        AdaptiveClip(**wrong)


@pytest.mark.parametrize("wrong", ["aut", True, 0.0, math.nan])
def test_a_wrong_quantile_is_one_sentence(wrong):
    with pytest.raises(InputError, match="quantile"):
        AdaptiveClip(quantile=wrong)


def test_the_quantile_falls_with_the_noise_and_is_a_number_once_it_is_settled():
    norms = [0.0, 0.01, 0.05, 0.25, 0.5, 1.0, 10.0, math.inf]
    quantiles = [quantile_for(norm) for norm in norms]
    assert quantiles == sorted(quantiles, reverse=True)
    assert (quantiles[0], quantiles[3], quantiles[-1]) == (0.9, 0.5, 0.2)
    auto = AdaptiveClip(quantile="auto")
    with pytest.raises(InputError, match="not settled yet"):
        auto.update(1.0, 0.5)
    assert auto.settled(0.25).quantile == 0.5
    assert auto.settled(None).quantile == 0.9
    assert AdaptiveClip(quantile=0.7).settled(0.25).quantile == 0.7


LONG = 3 * BLOCK + 17


def test_long_rows_have_the_norms_and_sums_of_exact_arithmetic():
    rows = torch.randn(3, LONG, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1e-20], [1.0], [1e20]])
    exact = [math.fsum(float(v) * float(v) for v in row) for row in rows.double()]
    assert row_norms(rows).tolist() == pytest.approx([math.sqrt(v) for v in exact], rel=1e-13)
    assert torch.equal(total(rows), rows.double().sum(0))


def test_a_long_row_ends_inside_the_ball_and_stays_there():
    rows = torch.randn(4, LONG, generator=torch.Generator().manual_seed(1))
    once = clip(rows, 0.3).vectors
    assert all(math.fsum(float(v) ** 2 for v in row) <= 0.3**2 for row in once.double())
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
    views = (
        rows,
        torch.cat([rows, rows], 1)[:, :width],
        torch.cat([torch.zeros(1), rows.flatten()])[1:].view(5, width),
    )
    for one in views:
        torch.testing.assert_close(row_norms(one.as_subclass(OnAnAccelerator)), plain(rows.double(), dim=1))
        assert seen[-1].shape[1] % 4 == 0
        assert seen[-1].is_contiguous()
        assert seen[-1].data_ptr() % 16 == 0
        assert (seen[-1].data_ptr() == one.data_ptr()) is (one is rows and width % 4 == 0), "a copy only where needed"


def test_only_with_reuse_are_the_rows_overwritten():
    rows = torch.full((2, 5), 3.0)
    kept = clip(rows, 1.0).vectors
    assert torch.equal(rows, torch.full((2, 5), 3.0))
    assert torch.equal(clip(rows, 1.0, reuse=True).vectors, kept)
