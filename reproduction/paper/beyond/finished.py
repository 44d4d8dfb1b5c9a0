"""A question beyond the paper: the runs that it asks for, and the finished ones that its answer is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import Any

from dpfedexp.config import Settings
from dpfedexp.engine.plot import Chart
from dpfedexp.report.document import Claim, Table
from reproduction.paper.experiments import experiment, vary
from reproduction.paper.results.planned import Result, points
from reproduction.paper.results.spread import Paired, Spread, final, paired, spread

Changes = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One of the paper's runs with changes. `method` gathers those of which the best counts; `x` is its place on a chart."""

    group: str
    label: str
    base: str
    changes: Changes = field(default_factory=dict)
    method: str = ""
    x: float | None = None
    seeds: int | None = None
    in_quick: bool = False

    @property
    def settings(self) -> Settings:
        return vary(experiment(self.base), self.changes)

    @property
    def curves(self) -> tuple[str, ...]:
        return ("round", "test_accuracy" if self.base.startswith("mnist") else "distance", "eta_g", "clip")


@dataclass(frozen=True)
class Finished:
    """A variant and its finished runs, one per seed."""

    variant: Variant
    results: list[Result]

    @property
    def on_mnist(self) -> bool:
        return self.variant.base.startswith("mnist")

    @property
    def finals(self) -> list[float]:
        metric, factor = ("test_accuracy", 100.0) if self.on_mnist else ("distance", 1.0)
        return [factor * final(result, metric) for result in self.results]

    @property
    def spread(self) -> Spread:
        return spread(self.finals)

    @property
    def last_model(self) -> Spread:
        """Test accuracy in per cent of the model that the run ends with."""
        return spread([100.0 * last(result, "test_accuracy") for result in self.results])

    def against(self, other: Finished) -> Paired:
        n = min(len(self.finals), len(other.finals))
        return paired(self.finals[:n], other.finals[:n], larger_is_better=self.on_mnist)

    @property
    def epsilon(self) -> str:
        return f"{self.results[0]['epsilon_total']:.3f}"

    @property
    def largest_step(self) -> float:
        """The largest η_g of a run, on average over the seeds."""
        return fmean(max(eta for _, eta in points(result, "eta_g") if eta is not None) for result in self.results)

    @property
    def step_size_sd(self) -> float:
        """How much η_g jumps from round to round in the second half, where it has settled."""
        curves = [[eta for _, eta in points(result, "eta_g") if eta is not None] for result in self.results]
        halves = [curve[len(curve) // 2 :] for curve in curves]
        return fmean(stdev(half) if len(half) > 1 else 0.0 for half in halves)


@dataclass(frozen=True)
class Answer:
    """What a section shows of it."""

    tables: list[Table] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


def last(result: Result, metric: str) -> float:
    """The metric at the end of the run; infinite where it diverged."""
    value = points(result, metric)[-1][1]
    return math.inf if value is None else value


def best_of_each_method(group: list[Finished]) -> dict[str, Finished]:
    """The best run of each method."""
    best: dict[str, Finished] = {}
    for one in group:
        name = one.variant.method
        if name not in best or one.spread.mean > best[name].spread.mean:
            best[name] = one
    return best
