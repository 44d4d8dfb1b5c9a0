"""ScalarDP is the same in every unit: the clip scales magnitudes and decides nothing else."""

import math

import pytest
import torch

from dpfedexp.errors import InputError
from dpfedexp.mechanisms.privunit import ScalarDP

CLIPS = (1e-4, 1.0, 1e4)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("epsilon2", [0.5, 2.0, 5.0, 9.0])
def test_levels_are_recovered_from_magnitudes_in_every_unit(epsilon2, clip):
    scalar = ScalarDP(epsilon2, clip)
    levels = torch.arange(scalar.k + 1)
    assert torch.equal(scalar.recover_level(scalar.magnitude(levels).abs()), levels)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("epsilon2", [math.log(4.0), math.log(9.0), math.log(4.0) + 1e-6])
def test_levels_of_one_magnitude_are_refused_in_every_unit(epsilon2, clip):
    with pytest.raises(InputError, match="two levels"):
        ScalarDP(epsilon2, clip).recover_level(torch.tensor([clip]))


def test_the_range_of_epsilon2_includes_60_and_not_0():
    assert ScalarDP(60.0, 1.0).epsilon2 == 60.0
    for wrong in (0.0, -1.0, 60.001):
        with pytest.raises(InputError, match="epsilon2"):
            ScalarDP(wrong, 1.0)
