"""Arguments of `train` from flat options, for tests that vary them one by one."""

from dataclasses import replace
from typing import Any

from dpfedexp import Evaluation, Full, LargerCohort
from dpfedexp.trainers.execution import as_execution


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """`seed`, `device`, `test`, `evaluate_every`, `metrics`, `held_out`, `population` and `noise_cohort` where they belong."""
    given = dict(options)
    execution = {name: given.pop(name) for name in ("seed", "device") if name in given}
    if execution:
        given["execution"] = replace(as_execution(given.get("execution")), **execution)
    names = {"evaluate_every": "every", "metrics": "metrics", "held_out": "held_out"}
    evaluation = {names[name]: given.pop(name) for name in names if name in given}
    on = given.pop("test", None)
    on = given.get("evaluate") if on is None else on
    if on is not None:
        given["evaluate"] = Evaluation(on, **evaluation) if evaluation else on
    declared = {name: given.pop(name) for name in ("population",) if name in given}
    cohort, participation = given.pop("noise_cohort", None), given.get("participation") or Full()
    if cohort is not None:
        given["participation"] = LargerCohort(participation, cohort, **declared)
    elif declared:
        given["participation"] = replace(participation, **declared)
    return given
