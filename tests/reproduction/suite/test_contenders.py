"""How contenders are called."""

from __future__ import annotations

import pytest
from reproduction.suite.contenders import ADAM_RATES, CONTENDERS, DELTA, SERVER_RATES
from reproduction.suite.plan import SuiteRun

from dpfedexp.core.step_size import FixedRate

TODAY = [name for name, one in CONTENDERS.items() if one.algorithm is not None and not one.why_missing]


@pytest.mark.parametrize("name", TODAY)
def test_every_contender_promises_the_same_epsilon_and_delta_with_an_adaptive_clip(name):
    contender = CONTENDERS[name]
    algorithm = contender.algorithm(2.0, contender.server_rates[0] if contender.server_rates else None)
    assert (algorithm.target_epsilon, algorithm.delta) == (2.0, DELTA)
    assert type(algorithm.clip).__name__ == "AdaptiveClip"


def test_tuned_rates_reach_the_server():
    assert [CONTENDERS["fedavg-tuned"].algorithm(8.0, rate).rule for rate in SERVER_RATES] == [
        FixedRate(rate) for rate in SERVER_RATES
    ]
    assert [CONTENDERS["fedadam-tuned"].algorithm(8.0, rate).server.lr for rate in ADAM_RATES] == list(ADAM_RATES)


def test_fedavg_and_tuned_fedavg_at_rate_1_are_one_run_and_other_rates_are_others():
    plain = SuiteRun("regression-0", "fedavg", 8.0, 0, 0.1).full_settings
    tuned = {rate: SuiteRun("regression-0", "fedavg-tuned", 8.0, 0, 0.1, rate).full_settings for rate in SERVER_RATES}
    assert [rate for rate, settings in tuned.items() if settings == plain] == [1.0]


@pytest.mark.parametrize("change", [{"seed": 1}, {"epsilon": 2.0}, {"lr": 0.2}, {"problem_name": "regression-2"}])
def test_whatever_changes_the_result_changes_the_settings(change):
    usual = {"problem_name": "regression-0", "contender_name": "fedavg", "epsilon": 8.0, "seed": 0, "lr": 0.1}
    assert SuiteRun(**usual).full_settings != SuiteRun(**usual | change).full_settings
