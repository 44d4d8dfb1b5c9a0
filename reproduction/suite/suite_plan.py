"""The runs of the suite: each a value that says all of its settings and knows how to run itself."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np

from dpfedexp.core.losses import resolve
from dpfedexp.engine.checkpoint import flatten
from dpfedexp.evaluation import on_test_set
from dpfedexp.files import finite
from dpfedexp.trainers.execution import Execution
from reproduction.paper.results.planned import Result, columns
from reproduction.suite.contenders import CONTENDERS, DELTA, Contender, trained
from reproduction.suite.problem import Folders, Loaded, Problem
from reproduction.suite.problems import PROBLEMS

SUITE_VERSION = 1
"""Raised when a problem changes, so that earlier lines do not answer for it."""
LEADING = 8.0
CURVES = ("round", "eta_g", "clip")
EVERY = 5
"""A record keeps the curves in every fifth round."""


SINCE = {"clip_gradient": None, "schedule": None, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
"""Fields of `Sgd` that are younger than the recorded results, with the values that those had."""


def _as_recorded(settings: dict[str, Any]) -> dict[str, Any]:
    """The names under which the results were recorded: functions of the library without its name, and no younger field."""
    young = {"algorithm.rule.subtracted": 0.0}
    if settings["local"] == "Sgd":
        young |= {f"local.{name}": value for name, value in SINCE.items()}
    return {
        name: value.removeprefix("dpfedexp.") if isinstance(value, str) else value
        for name, value in settings.items()
        if name not in young or value != young[name]
    }


@dataclass(frozen=True)
class SuiteRun:
    """One contender on one problem at one ε, with one seed.

    Attributes:
        lr: the local rate; None where it sets itself.
        server_rate: where the server's rate is tuned.
    """

    problem_name: str
    contender_name: str
    epsilon: float
    seed: int
    lr: float | None = None
    server_rate: float | None = None

    @property
    def problem(self) -> Problem:
        return PROBLEMS[self.problem_name]

    @property
    def contender(self) -> Contender:
        return CONTENDERS[self.contender_name]

    @property
    def name(self) -> str:
        parts = [f"{self.problem_name}: {self.contender.label}, ε = {self.epsilon:g}"]
        parts += [f"local rate {self.lr:g}"] if self.lr is not None else []
        parts += [f"server rate {self.server_rate:g}"] if self.server_rate is not None else []
        return ", ".join([*parts, f"seed {self.seed}"])

    @property
    def full_settings(self) -> dict[str, Any]:
        """Everything that the result depends on but the data. Two names for the same run have the same settings."""
        problem = self.problem
        tree: dict[str, Any] = {
            "suite_version": SUITE_VERSION,
            "problem": problem.name,
            "steps": problem.steps,
            "metric": problem.metric,
            "epsilon": self.epsilon,
            "delta": DELTA,
            "seed": self.seed,
        }
        if self.contender.algorithm is None:
            return {**tree, "fit": True}
        algorithm = self.contender.algorithm(self.epsilon, self.server_rate)
        local = self.contender.local(problem, self.lr)
        return {**tree, "rounds": problem.rounds, **_as_recorded(flatten({"algorithm": algorithm, "local": local}))}

    def run(self, folders: Folders, execution: Execution) -> Result:
        """`finals` has the test metrics of the model that the run releases at its end."""
        loaded = _loaded(self.problem_name, self.seed, folders)
        model, history, privacy = trained(
            self.contender,
            self.problem,
            loaded,
            epsilon=self.epsilon,
            lr=self.lr,
            server_rate=self.server_rate,
            seed=self.seed,
            execution=execution,
        )
        where = next(model.parameters()).device
        inputs, targets = loaded.clients.prepare(*loaded.test, where)
        metrics = on_test_set(inputs, targets, resolve(loaded.loss, targets))(model.eval())
        kept = columns([{key: finite(value) for key, value in record.items()} for record in history])
        return {
            "finals": finite(metrics),
            "curves": {
                name: [_short(value) for value in kept[name][EVERY - 1 :: EVERY]] for name in CURVES if name in kept
            },
            "epsilon_total": finite(privacy.epsilon_total),
            "delta": privacy.delta,
            "rounds": len(history),
            "largest_eta_g": _short(
                max((eta for eta in kept.get("eta_g", ()) if isinstance(eta, float)), default=None)
            ),
            "parameters": sum(p.numel() for p in model.parameters()),
        }


def value(problem: Problem, result: Result) -> float:
    """The compared number of a finished run: accuracy in percent, or loss; the worst possible where the run diverged."""
    found = result["finals"][f"test_{problem.metric}"]
    if found is None:
        return 0.0 if problem.higher_is_better else math.inf
    return 100.0 * found if problem.higher_is_better else float(found)


@dataclass(frozen=True)
class Size:
    """How much of the suite is run.

    Attributes:
        seeds: of every contender at ε = 8 and 2.
        headline_seeds: of FedAvg, safe FedEXP and fit.
        grid_seeds: of the grid of local rates.
        automatic_seeds: of the automatic rate.
        epsilons: where all contenders run, the leading one first.
        headline_epsilons: where FedAvg, safe FedEXP and fit run too.
    """

    seeds: int = 3
    headline_seeds: int = 5
    grid_seeds: int = 1
    automatic_seeds: int = 4
    epsilons: tuple[float, ...] = (LEADING, 2.0)
    headline_epsilons: tuple[float, ...] = (4.0, 1.0, 16.0)


QUICK = Size(1, 1, 1, 1, (LEADING,), ())
QUICK_PROBLEMS = ("regression-0", "regression-2", "classes-2")
HEADLINE = ("safe", "fedavg", "fit")
RIVALS = ("plain", "fedavg-tuned", "fedadam-tuned")


def available(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if not CONTENDERS[name].why_missing)


def grid(problem: Problem, contender: str, epsilon: float, size: Size) -> list[list[SuiteRun]]:
    """The runs at each of the problem's local rates."""
    return [
        [SuiteRun(problem.name, contender, epsilon, seed, lr) for seed in range(size.grid_seeds)]
        for lr in problem.rates
    ]


def best_rate(problem: Problem, results: Callable[[SuiteRun], Result | None], size: Size) -> float | None:
    """The local rate at which FedAvg is best at ε = 8, on the test data; None while its grid is not complete."""
    means = {}
    for runs in grid(problem, "fedavg", LEADING, size):
        found = [results(run) for run in runs]
        if any(result is None for result in found):
            return None
        means[runs[0].lr] = fmean(value(problem, result) for result in found if result is not None)
    return max(means, key=lambda lr: means[lr] if problem.higher_is_better else -means[lr])


def contest(problem: Problem, name: str, epsilon: float, lr: float, size: Size) -> dict[float | None, list[SuiteRun]]:
    """Server rate → the runs of a contender at ε, one per seed; the rate is None where nothing is tuned."""
    contender = CONTENDERS[name]
    seeds = size.headline_seeds if name in HEADLINE else size.seeds
    chosen = None if contender.algorithm is None else lr
    return {
        rate: [SuiteRun(problem.name, name, epsilon, seed, chosen, rate) for seed in range(seeds)]
        for rate in contender.server_rates or (None,)
    }


def automatic(problem: Problem, epsilon: float, size: Size) -> list[SuiteRun]:
    return [SuiteRun(problem.name, "auto", epsilon, seed) for seed in range(size.automatic_seeds)]


def stages(problem: Problem, lr: float, size: Size) -> Iterator[list[SuiteRun]]:
    """What is run once the local rate is known, the most telling first: a command that is cut short has most of what matters."""
    yield [
        run
        for e in size.epsilons
        for name in available((*HEADLINE, "plain"))
        for run in _all(problem, name, e, lr, size)
    ]
    if available(("auto",)):
        yield [run for e in size.epsilons for run in automatic(problem, e, size)]
    if available(("safe",)):
        yield [run for e in size.epsilons for runs in grid(problem, "safe", e, size) for run in runs]
    yield [run for e in size.epsilons for name in available(RIVALS[1:]) for run in _all(problem, name, e, lr, size)]
    yield [
        run for e in size.headline_epsilons for name in available(HEADLINE) for run in _all(problem, name, e, lr, size)
    ]


def _all(problem: Problem, name: str, epsilon: float, lr: float, size: Size) -> list[SuiteRun]:
    """Seed by seed, so that a command that is cut short has one of everything first."""
    runs = [run for runs in contest(problem, name, epsilon, lr, size).values() for run in runs]
    return sorted(runs, key=lambda run: run.seed)


@lru_cache(maxsize=6)
def _loaded(name: str, seed: int, folders: Folders) -> Loaded:
    """Runs in a row that share a problem find it in memory, and on the device."""
    return PROBLEMS[name].load(folders.suite, seed=seed, data=folders.data)


def fingerprint(problem: Problem, folders: Folders) -> str | None:
    """A hash of the clients' and the test data: a line that was made with other data does not answer.

    None for made-up data, which the problem's name and the seed decide up to rounding.
    """
    if problem.synthetic:
        return None
    loaded = _loaded(problem.name, 0, folders)
    digest = hashlib.sha256()
    for part in (loaded.clients.inputs, loaded.clients.targets, *loaded.test):
        digest.update(np.ascontiguousarray(part).tobytes())
    return digest.hexdigest()[:32]


def _short(number: Any) -> Any:
    return float(f"{number:.4g}") if isinstance(number, float) else number
