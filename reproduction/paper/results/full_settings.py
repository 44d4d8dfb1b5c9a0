"""A configuration with nothing left to a default: what a run is recorded with, and found by.

A default that changes changes the full settings of every run that relied on it, so a result that was recorded under the old
default is not found under the new one.
"""

from __future__ import annotations

import inspect
from typing import Any

from dpfedexp.algorithms import ALGORITHMS
from dpfedexp.config import Settings
from dpfedexp.config.settings import AdaptiveSettings
from dpfedexp.data.data_sets import DATA_SETS

Tree = dict[str, Any]

NOT_RECORDED: Any = {"resolved": True, "data": {"path"}, "run": {"device", "chunk_size"}}
"""Where a run happens, which its result does not depend on."""

ADDED_SINCE: Tree = {
    "algorithm.aggregation": None,
    "algorithm.step": "paper",
    "local.max_examples": None,
    "local.optimizer": "sgd",
    "participation.population": None,
    "participation.noise_cohort": None,
    "run.evaluate": None,
    "run.held_out": None,
}
"""Fields that are younger than the oldest records, with the value that every run had before there was a choice.

A record without the field is read as if it had this value. Whoever adds a field to the configuration adds it here too, if what was
recorded before stays true; without it the old records are not found any more.
"""

OPEN = (
    "mechanism",
    "numerator",
    "target_per",
    "delta",
    "adjacency",
    "gamma",
    "server_rate",
    "step",
    "average_last",
    "control",
)
"""Settings of an algorithm that may be left out, and that the algorithm then chooses."""
PRIVUNIT = ("epsilon0", "epsilon1", "epsilon2")


def in_full(settings: Settings) -> Tree:
    """Every setting by its value, also those that the file, the algorithm or the problem leaves to a default; as JSON."""
    tree = settings.model_dump(mode="json", exclude=NOT_RECORDED)
    algorithm, built = tree["algorithm"], settings.build_algorithm()
    parameters = inspect.signature(ALGORITHMS[algorithm["name"]]).parameters
    for name in OPEN:
        if algorithm[name] is not None or (name == "gamma" and built.mechanism != "privunit"):
            continue
        default = parameters[name].default if name in parameters else None
        algorithm[name] = getattr(built, name, None) if default in (None, ..., inspect.Parameter.empty) else default
    if built.mechanism == "privunit" and built.target_epsilon is None:
        algorithm |= dict(zip(PRIVUNIT, built.epsilons, strict=True))
    if algorithm["clip"] == "adaptive" and algorithm["adaptive"] is None:
        # Records of before had the median here, and named nothing: they are another run.
        algorithm["adaptive"] = AdaptiveSettings(quantile="auto").model_dump(mode="json")
    local = settings.build_local()
    tree["local"] |= {name: getattr(local, name) for name in ("steps", "epochs")}
    if tree["model"]["name"] is None and tree["model"]["factory"] is None:
        kind = tree["data"]["kind"]
        default = DATA_SETS[kind].model if kind in DATA_SETS else None
        tree["model"]["name"] = "linear_regression" if kind == "synthetic" else default
    return tree


def flat(tree: Tree, prefix: str = "") -> Tree:
    """`{"algorithm": {"clip": 0.3}}` as `{"algorithm.clip": 0.3}`, with what was added since the record was made."""
    leaves: Tree = {}
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            leaves |= flat(value, f"{prefix}{name}.")
        else:
            leaves[prefix + name] = value
    if prefix:
        return leaves
    return {**{name: value for name, value in ADDED_SINCE.items() if name.partition(".")[0] in tree}, **leaves}


def differences(now: Tree, then: Tree) -> list[str]:
    """What sets two full settings apart, field by field: "algorithm.clip is 0.31 now and was 0.3"."""
    ours, theirs = flat(now), flat(then)
    clauses = []
    for name in dict.fromkeys((*ours, *theirs)):
        if name not in theirs:
            clauses.append(f"{name} is {ours[name]!r} now and was not recorded")
        elif name not in ours:
            clauses.append(f"{name} was {theirs[name]!r} and does not exist any more")
        elif ours[name] != theirs[name]:
            clauses.append(f"{name} is {ours[name]!r} now and was {theirs[name]!r}")
    return clauses
