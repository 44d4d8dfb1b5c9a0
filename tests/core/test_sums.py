"""Sums add, field by field."""

import torch

from dpfedexp.core.sums import Sums


def test_every_field_adds():
    one = Sums(torch.tensor([1.0, 2.0]).double(), torch.tensor(3.0).double(), torch.tensor([4.0]).double(), 5)
    two = Sums(torch.tensor([10.0, 20.0]).double(), torch.tensor(30.0).double(), torch.tensor([40.0]).double(), 50)
    both = one + two
    assert both.vector.tolist() == [11.0, 22.0]
    assert (float(both.squares), float(both.votes), both.count) == (33.0, 44.0, 55)


def test_zero_is_of_its_width_in_double_precision():
    zero = Sums.zero(3, votes=1)
    assert zero.vector.tolist() == [0.0] * 3
    assert zero.vector.dtype == zero.squares.dtype == zero.votes.dtype == torch.float64
    assert (float(zero.squares), float(zero.votes), zero.count) == (0.0, 0.0, 0)
    # Squares and counts are separate numbers: adding to one in place must not show in the other.
    zero.squares.add_(1.0)
    assert float(zero.votes) == 0.0
