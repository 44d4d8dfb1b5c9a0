"""From recorded runs to tables: means over seeds, the best of what was tuned, and paired differences with their standard error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from dpfedexp.report.document import Table
from reproduction.paper.results.planned import Result
from reproduction.suite.contenders import CONTENDERS
from reproduction.suite.problem import Problem
from reproduction.suite.suite_plan import Size, SuiteRun, automatic, contest, grid, value

Lookup = Callable[[SuiteRun], Result | None]
MARK = "✗"
POINTS, SHARE = 1.0, 0.02
"""What the automatic rate may lose to the best of the grid: a point of accuracy, or 2% of the loss."""
COLLAPSE_SHARE = 0.5


@dataclass(frozen=True)
class Cell:
    """A contender on a problem at an ε: its numbers over seeds, at the server rate that was best."""

    values: tuple[float, ...]
    server_rate: float | None = None

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def error(self) -> float:
        """Standard error of the mean; 0 with one seed, infinite where a run diverged."""
        return standard_error(self.values)

    def show(self, problem: Problem) -> str:
        shown = number(self.mean, problem)
        if len(self.values) > 1 and math.isfinite(self.error):
            shown += f" ± {small(self.error, problem)}"
        return shown if self.server_rate is None else f"{shown} [{self.server_rate:g}]"


def standard_error(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    return stdev(values) / math.sqrt(len(values)) if all(map(math.isfinite, values)) else math.inf


def number(x: float, problem: Problem) -> str:
    if not math.isfinite(x):
        return "diverged"
    return f"{x:.2f}" if problem.higher_is_better else f"{x:z.4f}" if x < 100 else f"{x:.2g}"


def small(x: float, problem: Problem) -> str:
    return f"{x:.2f}" if problem.higher_is_better else f"{x:z.4f}" if x < 100 else f"{x:.1g}"


def values(runs: Sequence[SuiteRun], lookup: Lookup) -> tuple[float, ...]:
    """Of the runs that are recorded, in the order of their seeds; none where a seed in between is missing."""
    found = []
    for run in runs:
        result = lookup(run)
        if result is None:
            break
        found.append(value(run.problem, result))
    return tuple(found)


def cell(problem: Problem, name: str, epsilon: float, lr: float, size: Size, lookup: Lookup) -> Cell | None:
    """None where nothing is recorded, or not every server rate that the best is sought among."""
    cells = []
    for rate, runs in contest(problem, name, epsilon, lr, size).items():
        found = values(runs, lookup)
        if not found:
            return None
        cells.append(Cell(found, rate))
    return max(cells, key=lambda one: one.mean if problem.higher_is_better else -one.mean)


@dataclass(frozen=True)
class Difference:
    """What safe FedEXP gains over FedAvg at the same local rate, seed by seed; positive is better, for a loss too."""

    gain: float
    error: float
    seeds: int

    @property
    def worse(self) -> bool:
        """Worse by more than one standard error; with one seed there is none to judge by."""
        return self.seeds > 1 and self.gain < -self.error

    def show(self, problem: Problem) -> str:
        if not math.isfinite(self.gain):
            return "FedAvg diverged" if self.gain > 0 else f"diverged {MARK}"
        sign = "+" if self.gain >= 0 else "−"
        error = f" ± {small(self.error, problem)}" if self.seeds > 1 else ""
        return f"{sign}{number(abs(self.gain), problem)}{error}" + (f" {MARK}" if self.worse else "")


def difference(problem: Problem, ours: Cell | None, theirs: Cell | None) -> Difference | None:
    if ours is None or theirs is None:
        return None
    sign = 1.0 if problem.higher_is_better else -1.0
    # Two runs that both diverged are as bad as each other.
    gains = [0.0 if a == b else sign * (a - b) for a, b in zip(ours.values, theirs.values, strict=False)]
    infinite = [gain for gain in gains if not math.isfinite(gain)]
    if infinite:
        return Difference(min(infinite), 0.0, len(gains))
    return Difference(fmean(gains), standard_error(gains), len(gains))


def at_epsilon(
    rates: dict[Problem, float], epsilon: float, names: Sequence[str], size: Size, lookup: Lookup
) -> tuple[Table, dict[str, Difference]]:
    """Problem × contender at one ε, and what safe FedEXP gains on each problem."""
    rows, gains = [], {}
    for problem, lr in rates.items():
        cells = {name: cell(problem, name, epsilon, lr, size, lookup) for name in names}
        gain = difference(problem, cells.get("safe"), cells.get("fedavg"))
        if gain is not None:
            gains[problem.name] = gain
        unit = "accuracy, %" if problem.higher_is_better else "loss"
        row = [problem.name, unit, *("–" if found is None else found.show(problem) for found in cells.values())]
        rows.append([*row, "–" if gain is None else gain.show(problem)])
    columns = ["problem", "test", *(CONTENDERS[name].label for name in names), "safe over FedAvg"]
    return Table(f"ε = {epsilon:g}", columns, rows), gains


@dataclass(frozen=True)
class Gap:
    """What the automatic rate loses against the best rate of the grid, on the grid's own seeds.

    Attributes:
        best: the mean of the grid's best rate.
        reached: what the automatic rate reached, seed by seed.
        seeds: how many of these, the first, the grid has too.
    """

    problem: Problem
    epsilon: float
    best: float
    reached: tuple[float, ...]
    seeds: int

    @property
    def loss(self) -> float:
        """In points of accuracy, or as a share of the best loss; negative where it is better than the grid."""
        mean = fmean(self.reached[: self.seeds])
        return self.best - mean if self.problem.higher_is_better else mean / self.best - 1.0

    @property
    def too_large(self) -> bool:
        return not self.loss <= (POINTS if self.problem.higher_is_better else SHARE)

    @property
    def collapses(self) -> int:
        """Runs that end with half the best accuracy or less, or with twice the best loss or more."""
        if self.problem.higher_is_better:
            return sum(one <= COLLAPSE_SHARE * self.best for one in self.reached)
        return sum(not one < self.best / COLLAPSE_SHARE for one in self.reached)

    def show(self) -> str:
        if not math.isfinite(self.loss):
            return f"diverged {MARK}"
        shown = f"{self.loss:+.2f}" if self.problem.higher_is_better else f"{100 * self.loss:+.1f}%"
        return f"{shown} {MARK}" if self.too_large else shown


def automatic_rates(
    problems: Sequence[Problem], epsilons: Sequence[float], size: Size, lookup: Lookup
) -> tuple[Table, list[Gap]]:
    """Problem by problem, the gap of the automatic rate to the best of the nine, both with the safe step."""
    rows, gaps = [], []
    for problem in problems:
        for epsilon in epsilons:
            points = {runs[0].lr: values(runs, lookup) for runs in grid(problem, "safe", epsilon, size)}
            if not all(points.values()):
                continue
            sign = 1.0 if problem.higher_is_better else -1.0
            lr = max(points, key=lambda rate: sign * fmean(points[rate]))
            best = fmean(points[lr])
            reached = values(automatic(problem, epsilon, size), lookup)
            if reached:
                gaps.append(Gap(problem, epsilon, best, reached, size.grid_seeds))
            shown = [Cell(reached).show(problem), gaps[-1].show()] if reached else ["–", "–"]
            rows.append([problem.name, f"{epsilon:g}", f"{number(best, problem)} [{lr:g}]", *shown])
    columns = ["problem", "ε", "best of 9 rates", "automatic", "lost"]
    return Table("Automatic local rate: what it loses to the best of the grid", columns, rows), gaps
