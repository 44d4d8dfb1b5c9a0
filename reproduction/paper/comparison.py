"""Three privacy settings × three algorithms on one problem, over seeds: the runs behind Fig. 1, Fig. 3 and Table 3."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpfedexp.config import Settings
from dpfedexp.engine.plot import Panel, Series
from dpfedexp.report.document import Table
from reproduction.paper.experiments import experiment
from reproduction.paper.published import ALGORITHMS, LAST_ROUNDS, SETTINGS
from reproduction.paper.results.collected import Results
from reproduction.paper.results.planned import PlannedRun, Result, points, trainings
from reproduction.paper.results.size import Size
from reproduction.paper.results.spread import Paired, Spread, final, paired, spread

Key = tuple[str, str]


def runs(problem: str, size: Size, algorithms: Iterable[str] = ALGORITHMS) -> dict[Key, list[Settings]]:
    """(setting, algorithm) → the paper's settings, once for every seed."""
    return {
        (setting, algorithm): size.runs(experiment(f"{problem}-{setting}-{algorithm}"))
        for setting in SETTINGS
        for algorithm in algorithms
    }


def planned(
    problem: str, size: Size, curves: tuple[str, ...], algorithms: Iterable[str] = ALGORITHMS
) -> list[PlannedRun]:
    """The same as runs whose records keep some curves."""
    groups = runs(problem, size, algorithms)
    return [run for key, group in groups.items() for run in trainings(group, "-".join((problem, *key)), curves)]


@dataclass(frozen=True)
class Comparison:
    """The finished runs of one problem, and the metric that they are compared by."""

    metric: str
    factor: float
    larger_is_better: bool
    settings: dict[Key, list[Settings]]
    results: dict[Key, list[Result]]

    @staticmethod
    def of(problem: str, size: Size, results: Results, algorithms: Iterable[str] = ALGORITHMS) -> Comparison:
        planned = runs(problem, size, algorithms)
        metric, factor = ("test_accuracy", 100.0) if problem == "mnist" else ("distance", 1.0)
        done = {key: results.training(group) for key, group in planned.items()}
        return Comparison(metric, factor, problem == "mnist", planned, done)

    def finals(self, key: Key) -> list[float]:
        """One number per seed: the metric over the last rounds."""
        return [self.factor * final(result, self.metric) for result in self.results[key]]

    def spread(self, key: Key) -> Spread:
        return spread(self.finals(key))

    def gain(self, setting: str, over: str) -> Paired:
        """FedEXP against another algorithm, paired over seeds; a positive gain is an improvement."""
        return paired(
            self.finals((setting, "fedexp")), self.finals((setting, over)), larger_is_better=self.larger_is_better
        )

    def gains_table(self, title: str, note: str, published: dict[Key, float] | None = None) -> Table:
        """FedEXP beside every other algorithm."""
        columns = [
            "setting",
            "FedEXP against",
            "gain",
            *(["paper's gain"] if published else []),
            "seeds",
            "p (t)",
            "p (sign)",
        ]
        rows = []
        for setting, name in SETTINGS.items():
            for other in ("fedavg", "scaffold"):
                test = self.gain(setting, other)
                theirs = [f"{published[setting, other]:+.2f}"] if published else []
                p_t, p_sign = ("–" if p is None else f"{p:.2g}" for p in (test.p_t, test.p_sign))
                rows.append(
                    [name, ALGORITHMS[other], f"{test.gain:+.2f}", *theirs, f"{test.wins} of {test.n}", p_t, p_sign]
                )
        return Table(title, columns, rows, note)

    def panels(self, metric: str, y_label: str, factor: float = 1.0, log_y: bool = False) -> list[Panel]:
        """The metric over rounds, a panel to a setting."""
        return [
            Panel(
                name,
                "round",
                y_label,
                [line(self.results[setting, a], metric, label, a, factor) for a, label in ALGORITHMS.items()],
                log_y=log_y,
            )
            for setting, name in SETTINGS.items()
        ]

    def epsilons(self, key: Key) -> list[str]:
        first = self.results[key][0]
        return [f"{first['epsilon_round']:.3f}", f"{first['epsilon_total']:.3f}"]

    def data(self) -> list[dict[str, Any]]:
        return [
            {
                "setting": setting,
                "algorithm": algorithm,
                "mean": self.spread((setting, algorithm)).mean,
                "sd": self.spread((setting, algorithm)).sd,
                "per_seed": self.finals((setting, algorithm)),
                "seconds": [result["seconds"] for result in group],
                "epsilon_round": group[0]["epsilon_round"],
                "epsilon_total": group[0]["epsilon_total"],
            }
            for (setting, algorithm), group in self.results.items()
        ]

    def configuration(self) -> dict[str, str]:
        return {
            f"{SETTINGS[setting]}, {ALGORITHMS[algorithm]}": group[0].to_toml()
            for (setting, algorithm), group in self.settings.items()
        }

    def privacy(self) -> dict[str, str]:
        return {
            f"{SETTINGS[setting]}, {ALGORITHMS[algorithm]}": group[0]["privacy"]
            for (setting, algorithm), group in self.results.items()
        }


def line(results: Sequence[Result], metric: str, name: str, color: str = "", factor: float = 1.0) -> Series:
    """A metric over rounds: mean over seeds, with a band of one standard deviation; a run that diverged stays at its last value."""
    rounds = [number for number, _ in points(results[0], metric)]
    values = factor * np.array([_filled([value for _, value in points(result, metric)]) for result in results])
    mean = values.mean(0)
    sd = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    return Series(name, rounds, mean.tolist(), (mean - sd).tolist(), (mean + sd).tolist(), color)


def _filled(values: list[float | None]) -> list[float]:
    filled: list[float] = []
    for value in values:
        filled.append(value if value is not None else filled[-1] if filled else 0.0)
    return filled


LAST = f"the average of the last {LAST_ROUNDS} rounds"
