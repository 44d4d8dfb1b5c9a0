"""Results of suite runs as a function of their settings, without running anything."""

from __future__ import annotations

import math

from reproduction.paper.results.planned import Result
from reproduction.suite.plan import SuiteRun

ADVANTAGE = {
    "fit": 0.04,
    "safe": 0.03,
    "fedavg": 0.0,
    "plain": -0.1,
    "auto": 0.03,
    "fedavg-tuned": 0.02,
    "fedadam-tuned": 0.0,
}


def made_up_result(run: SuiteRun, advantage: dict[str, float] = ADVANTAGE) -> Result:
    """Better near the middle of the grid, at larger ε and at server rate 2; every seed shifts all contenders alike."""
    quality = advantage[run.contender_name] + 0.02 * math.log2(run.epsilon / 8.0) + 0.01 * (run.seed - 2)
    if run.lr is not None:
        quality -= 0.1 * abs(math.log10(run.lr / run.problem.centre))
    if run.server_rate is not None:
        quality -= 0.01 * abs(math.log2(run.server_rate / 2.0))
    return {"finals": {"test_accuracy": 0.8 + quality, "test_loss": 0.3 * math.exp(-3.0 * quality)}}
