"""The paper's synthetic experiments (Fig. 1 left): distance to the known optimum over rounds."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp import problem
from dpfedexp.config import Settings
from dpfedexp.paper.experiments import experiment
from dpfedexp.simulation.train import train

DEMO_SETTINGS = ("cdp", "ldp-gaussian")
ALGORITHMS = ("fedexp", "fedavg", "scaffold")
DELTA = 1e-5


@dataclass(frozen=True)
class Cell:
    """One run: a setting, an algorithm and a seed."""

    setting: str
    algorithm: str
    seed: int
    settings: Settings


@dataclass(frozen=True)
class Result:
    cell: Cell
    history: list[dict[str, Any]]
    epsilon_round: float
    epsilon_total: float

    @property
    def final(self) -> float:
        return self.history[-1]["distance"]


@dataclass(frozen=True)
class Row:
    """Mean and standard deviation over seeds."""

    setting: str
    algorithm: str
    mean: float
    sd: float
    epsilon_round: float
    epsilon_total: float


def demo_cells(seeds: int) -> list[Cell]:
    """Central and local Gaussian, with the free rule, so that FedEXP and FedAvg promise exactly the same."""
    cells = []
    for setting in DEMO_SETTINGS:
        for algorithm in ALGORITHMS:
            settings = experiment(f"synthetic-{setting}-{algorithm}")
            if algorithm == "fedexp":
                free = settings.algorithm.model_copy(update={"numerator": "free"})
                settings = settings.model_copy(update={"algorithm": free})
            cells += [Cell(setting, algorithm, seed, settings.with_seed(seed)) for seed in range(seeds)]
    return cells


def run(cell: Cell) -> Result:
    posed = problem.build(cell.settings)
    run = train(
        posed.model,
        posed.federation,
        cell.settings.build_algorithm(),
        local=cell.settings.build_local(),
        rounds=cell.settings.run.rounds,
        seed=cell.seed,
        evaluate=posed.evaluate,
        progress=False,
    )
    return Result(cell, run.history, run.privacy.epsilon_round, run.privacy.epsilon_total)


def summarise(results: list[Result]) -> list[Row]:
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.cell.setting, result.cell.algorithm), []).append(result)
    rows = []
    for (setting, algorithm), group in groups.items():
        finals = [result.final for result in group]
        spread = statistics.stdev(finals) if len(finals) > 1 else 0.0
        first = group[0]
        rows.append(Row(setting, algorithm, statistics.mean(finals), spread, first.epsilon_round, first.epsilon_total))
    return rows


def sentence(rows: list[Row], results: list[Result]) -> str:
    """What was seen."""
    at = {(row.setting, row.algorithm): row for row in rows}
    parts = []
    for setting, place in (("cdp", "central"), ("ldp-gaussian", "local")):
        ours, theirs = at[setting, "fedexp"], at[setting, "fedavg"]
        better = sum(
            a.final < b.final
            for a, b in zip(_of(results, setting, "fedexp"), _of(results, setting, "fedavg"), strict=True)
        )
        parts.append(
            f"with {place} DP FedEXP ends at {ours.mean / theirs.mean:.2f} times FedAvg's distance "
            f"(closer in {better} of {len(_of(results, setting, 'fedavg'))} seeds)"
        )
    same = all(
        abs(at[s, "fedexp"].epsilon_total - at[s, "fedavg"].epsilon_total) < 1e-9 for s in ("cdp", "ldp-gaussian")
    )
    tail = "at exactly the same ε, and with nothing to tune on the server." if same else "at the ε in the table."
    return f"Seen: {'; '.join(parts)}; {tail}"


def write(folder: Path, results: list[Result]) -> list[Path]:
    """summary.json, and the figure as PNG and SVG."""
    from dpfedexp.report.figures import distance_figure

    folder.mkdir(parents=True, exist_ok=True)
    summary = folder / "summary.json"
    lines = [
        {
            "setting": r.cell.setting,
            "algorithm": r.cell.algorithm,
            "seed": r.cell.seed,
            "final_distance": r.final,
            "epsilon_total": r.epsilon_total,
            "epsilon_round": r.epsilon_round,
        }
        for r in results
    ]
    summary.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    curves = {
        setting: {
            algorithm: [[record["distance"] for record in r.history] for r in _of(results, setting, algorithm)]
            for algorithm in ALGORITHMS
        }
        for setting in DEMO_SETTINGS
    }
    return [summary, *distance_figure(curves, folder / "distance")]


def _of(results: list[Result], setting: str, algorithm: str) -> list[Result]:
    return [r for r in results if (r.cell.setting, r.cell.algorithm) == (setting, algorithm)]
