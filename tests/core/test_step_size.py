"""The step sizes of the paper's equations, and what they are where the ratio does not exist."""

import math

import pytest
import torch

from dpfedexp.core import step_size
from dpfedexp.core.sums import Release

C_BAR = torch.tensor([0.3, 0.4], dtype=torch.float64)  # ‖c̄‖² = 0.25


def released(numerator, c_bar=C_BAR, clip=1.0, sigma=0.0):
    return Release(c_bar, numerator, {}, clip, sigma=sigma)


def test_every_rule_is_its_equation():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert step_size.fedexp(released(1.0, rows.mean(0))) == pytest.approx(2.0)
    assert step_size.naive(released(5.0)) == pytest.approx(20.0)
    assert step_size.target(0.1, C_BAR) == pytest.approx(0.4)
    # Less the energy of the noise in both coordinates.
    assert step_size.ldp_gaussian(released(1.0 + 2 * 0.7**2, sigma=0.7)) == pytest.approx(4.0)
    assert step_size.ldp_privunit(released(0.5)) == step_size.cdp(released(0.5)) == pytest.approx(2.0)
    # From the last coordinate, (C² − mean square)/C.
    assert step_size.free(released((0.8**2 - 0.5) / 0.8, clip=0.8)) == pytest.approx(0.5 / 0.25)


@pytest.mark.parametrize(
    ("rule", "release"),
    [
        (step_size.ldp_gaussian, released(0.0, sigma=1.0)),
        (step_size.ldp_privunit, released(-3.0)),
        (step_size.cdp, released(-3.0)),
        (step_size.free, released(9.0, clip=0.3)),
    ],
)
def test_private_rules_never_go_below_one(rule, release):
    assert rule(release) == 1.0


@pytest.mark.parametrize(
    ("square", "mean"),
    [(1e300, 1e-10), (math.inf, 1.0), (math.nan, 1.0), (1.0, math.nan), (math.inf, math.inf), (1.0, 0.0)],
)
def test_a_ratio_that_is_not_a_number_is_one(square, mean):
    c_bar = torch.full((2,), mean, dtype=torch.float64)
    assert step_size.target(square, c_bar) == 1.0
    assert step_size.fedexp(released(square, c_bar)) == step_size.naive(released(square, c_bar)) == 1.0


def test_a_ratio_that_is_a_number_is_itself_down_to_the_smallest_mean():
    assert step_size.target(6.0, torch.tensor([1.0, 1.0])) == 3.0
    assert step_size.target(0.5, torch.tensor([1.0, 0.0])) == 0.5
    assert step_size.target(1e-300, torch.tensor([1e-150], dtype=torch.float64)) == pytest.approx(1.0, rel=1e-12)
