import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpfedexp.core import noise as lattice
from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import ChaChaNoise, add_noise, check_room, discrete_gaussian, step_for, truncate, truncated_sum
from dpfedexp.errors import InputError

ONE_IN_A_MILLION = 1e-6
scales = st.floats(min_value=1e-12, max_value=1e12)
rows = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8)


@given(scales, st.booleans())
def test_a_step_is_a_power_of_two_and_noise_spans_the_promised_number_of_them(deviation, strict):
    step = step_for(deviation, strict)
    assert math.frexp(step)[0] == 0.5
    bits = lattice.STRICT_BITS if strict else lattice.BITS
    assert 2**bits <= deviation / step < 2 ** (bits + 1)


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("clients", [1, 3])
def test_the_sum_of_truncated_rows_is_exact_and_leaves_them_as_they_were(clients, kind):
    step = step_for(5.0)
    given = torch.randn(clients, lattice.PIECE // clients + 7, dtype=kind)
    before = given.clone()
    assert torch.equal(truncated_sum(given, step), truncate(given, step).sum(0).double() * step)
    assert torch.equal(given, before)
    # −0 and 0 are told apart in what is released, where the noise is −0.
    assert not torch.signbit(truncated_sum(torch.full((clients, 4), -0.25 * step), step)).any()


@given(rows, scales)
@settings(max_examples=100)
def test_truncation_never_makes_a_norm_larger_and_never_changes_a_sign(values, radius):
    """In exact rational arithmetic."""
    from fractions import Fraction

    step = step_for(5.0 * radius)
    inside = clip(torch.tensor([values]), radius).vectors
    units = truncate(inside, step)[0].tolist()
    exact = [Fraction(u) * Fraction(step) for u in units]
    before = [Fraction(v) for v in inside.double()[0].tolist()]
    assert sum(x * x for x in exact) <= sum(x * x for x in before) <= Fraction(radius) ** 2
    assert all(abs(b - e) < Fraction(step) and e * b >= 0 for e, b in zip(exact, before, strict=True))


@given(st.permutations(range(6)), st.integers(1, 5))
def test_sums_on_the_grid_do_not_depend_on_the_order_or_the_chunks(order, cut):
    step = step_for(5.0)
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    whole = truncate(values, step).sum(0).double() * step
    shuffled = truncate(values[list(order)], step)
    parts = shuffled[:cut].sum(0).double() * step + shuffled[cut:].sum(0).double() * step
    assert torch.equal(whole, parts)


def test_sums_that_are_off_the_grid_or_too_large_for_it_are_refused():
    check_room(10**6, 1.0, step_for(1.0))
    with pytest.raises(InputError, match="52 bits"):
        check_room(10**6, 1.0, step_for(1e-6))
    for deviation in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(InputError, match="positive"):
            step_for(deviation)
    with pytest.raises(InputError, match="not on the lattice"):
        add_noise(torch.tensor([[0.1]], dtype=torch.float64), step_for(5.0), 5.0, ChaChaNoise())


@pytest.mark.parametrize("strict", [False, True])
def test_noisy_values_are_on_the_grid_with_the_right_law(strict):
    deviation, count = 3.0, 5_000
    step = step_for(deviation, strict)
    noisy = add_noise(torch.zeros(1, count, dtype=torch.float64), step, deviation, ChaChaNoise(), strict)[0]
    assert torch.equal(noisy / step, (noisy / step).round())
    assert stats.kstest((noisy / deviation).numpy(), "norm").pvalue > ONE_IN_A_MILLION


def test_the_discrete_gaussian_has_the_law_of_its_definition():
    scale, count = 1.7, 20_000
    drawn = discrete_gaussian([count], scale)
    assert torch.equal(drawn, drawn.round())
    weights = torch.exp(-(torch.arange(-60, 61).double() ** 2) / (2 * scale**2))
    expected = count * (weights / weights.sum())[55:66]
    seen = torch.stack([(drawn == value).sum() for value in range(-5, 6)]).double()
    tables = ([*part.tolist(), count - float(part.sum())] for part in (seen, expected))
    assert stats.chisquare(*tables).pvalue > ONE_IN_A_MILLION
