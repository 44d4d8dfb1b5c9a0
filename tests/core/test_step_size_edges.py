"""Step sizes where the ratio does not exist: one, so that nothing is extrapolated."""

import math

import pytest
import torch

from dpfedexp.core import step_size

RULES = {
    "fedexp": lambda square, mean: step_size.fedexp(square, mean),
    "naive": lambda square, mean: step_size.naive(square, mean),
    "target": lambda square, mean: step_size.target(square, mean),
}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("square", "mean"),
    [(1e300, 1e-10), (math.inf, 1.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (1.0, 0.0)],
)
def test_a_ratio_that_is_not_a_number_is_one(rule, square, mean):
    assert RULES[rule](square, torch.full((2,), mean, dtype=torch.float64)) == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_a_ratio_that_is_a_number_is_itself_down_to_the_smallest_mean(rule):
    assert RULES[rule](6.0, torch.tensor([1.0, 1.0])) == 3.0
    assert RULES[rule](0.5, torch.tensor([1.0, 0.0])) == 0.5
    assert RULES[rule](1e-300, torch.tensor([1e-150], dtype=torch.float64)) == pytest.approx(1.0, rel=1e-12)
