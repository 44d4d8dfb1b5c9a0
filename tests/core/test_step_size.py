import pytest
import torch

from dpfedexp.core import step_size

C_BAR = torch.tensor([0.3, 0.4], dtype=torch.float64)  # ‖c̄‖² = 0.25


def test_fedexp_is_the_ratio_of_mean_square_to_squared_mean():
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert step_size.fedexp(1.0, rows.mean(0)) == pytest.approx(2.0)


def test_naive_and_target_are_plain_ratios():
    assert step_size.naive(5.0, C_BAR) == pytest.approx(20.0)
    assert step_size.target(0.1, C_BAR) == pytest.approx(0.4)


def test_ldp_gaussian_subtracts_the_energy_of_the_noise_in_all_coordinates():
    assert step_size.ldp_gaussian(1.0 + 2 * 0.7**2, C_BAR, sigma=0.7) == pytest.approx(4.0)


def test_ldp_privunit_and_cdp_divide_by_the_released_mean():
    assert step_size.ldp_privunit(0.5, C_BAR) == pytest.approx(2.0)
    assert step_size.cdp(0.5, C_BAR) == pytest.approx(2.0)


def test_free_reads_the_mean_square_from_the_last_coordinate():
    clip, mean_square = 0.8, 0.5
    last = (clip**2 - mean_square) / clip
    assert step_size.free(last, C_BAR, clip) == pytest.approx(mean_square / 0.25)


@pytest.mark.parametrize(
    "rule",
    [
        lambda: step_size.ldp_gaussian(0.0, C_BAR, 1.0),
        lambda: step_size.ldp_privunit(-3.0, C_BAR),
        lambda: step_size.cdp(-3.0, C_BAR),
        lambda: step_size.free(9.0, C_BAR, 0.3),
    ],
)
def test_private_rules_never_go_below_one(rule):
    assert rule() == 1.0


def test_a_zero_mean_gives_a_step_of_one():
    assert step_size.cdp(1.0, torch.zeros(3)) == 1.0
