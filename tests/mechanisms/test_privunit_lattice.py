"""The grid of secure PrivUnit: its step is public, a power of two, and 2⁻¹² of a typical coordinate."""

import pytest
import torch

from dpfedexp.core.clipping import clip
from dpfedexp.core.noise.chacha import ChaChaNoise
from dpfedexp.mechanisms import PrivUnit


@pytest.mark.parametrize(("dimension", "exponent"), [(4, -13), (16, -14), (17, -15), (64, -15), (65, -16), (5000, -19)])
def test_the_step_is_two_to_the_minus_twelve_of_the_power_of_two_below_a_typical_coordinate(dimension, exponent):
    assert PrivUnit(1.0, dimension).secure().step == 2.0**exponent
    assert 2.0**-13 < PrivUnit(1.0, dimension).secure().step * dimension**0.5 <= 2.0**-12


def test_every_coordinate_of_a_report_is_a_whole_number_of_steps_and_the_row_keeps_its_length():
    mechanism = PrivUnit(1.0, 17).secure()
    rows = torch.randn(50, 17, generator=torch.Generator().manual_seed(0))
    report = mechanism.randomize(clip(rows, 1.0), torch.arange(50), ChaChaNoise())
    units = report.vector.double() / mechanism.step
    assert report.vector.dtype == torch.float32
    assert torch.equal(units, units.round())
    # A coordinate moves by at most half a step: the length by at most √17/2 steps, 6.3e-5.
    torch.testing.assert_close(report.vector.double().norm(dim=1), torch.ones(50).double(), rtol=0, atol=6.4e-5)
    assert report.level.shape == (50,)
