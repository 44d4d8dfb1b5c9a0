"""Fig. 2: three step sizes from the same reports."""

from __future__ import annotations

import pytest
import torch
from reproduction.paper.figure2_reports import RULES, InitialStepRun, from_updates
from reproduction.paper.results.planned import Place

from dpfedexp.core import step_size
from dpfedexp.mechanisms import LocalGaussian, PrivUnit


def updates(clients: int, dimension: int) -> torch.Tensor:
    common = torch.ones(dimension) / dimension**0.5
    return (
        0.2 * common
        + 0.1 * torch.randn(clients, dimension, generator=torch.Generator().manual_seed(0)) / dimension**0.5
    )


def test_naive_is_off_by_the_noise_energy_and_proposed_is_not():
    """With σ = 0.7C, E‖c‖² = ‖Δ‖² + dσ²; the corrected numerator's relative sd here is 2 %, and 10 % is five of them."""
    d, c = 50, 0.3
    sizes = from_updates(LocalGaussian(c, 0.7, "paper"), step_size.ldp_gaussian, updates(20_000, d), seed=1)
    excess = d * (0.7 * c) ** 2 / 0.05
    assert sizes["naive"] / sizes["target"] == pytest.approx(1 + excess, rel=0.05)
    assert sizes["proposed"] == pytest.approx(sizes["target"], rel=0.1)


def test_privunit_proposed_is_near_the_target_and_naive_far():
    sizes = from_updates(
        PrivUnit(0.3, 50, 2.0, 2.0, 2.0, gamma="paper"), step_size.ldp_privunit, updates(20_000, 50), seed=1
    )
    assert sizes["naive"] > 10 * sizes["target"]
    # ŝ is biased by up to (C/2)²/4 = 0.0056 of the mean square 0.05.
    assert sizes["proposed"] == pytest.approx(sizes["target"], rel=0.15)


def test_a_run_holds_every_repetition_of_every_rule_and_their_means():
    result = InitialStepRun("ldp-gaussian", 40, 3).run(Place("cpu"))
    assert set(result["curves"]) == set(result["finals"]) == set(RULES)
    assert all(len(values) == 3 for values in result["curves"].values())
    assert result["curves"]["naive"][0] > result["curves"]["target"][0]
    assert result["finals"]["target"] == pytest.approx(sum(result["curves"]["target"]) / 3)


def test_the_full_settings_depend_on_setting_clients_and_repetitions():
    runs = [InitialStepRun(s, m, r) for s in ("ldp-gaussian", "ldp-privunit") for m in (10, 20) for r in (2, 3)]
    assert len({str(run.full_settings) for run in runs}) == len(runs)
