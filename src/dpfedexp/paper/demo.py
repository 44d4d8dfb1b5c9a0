"""The demonstration: the paper's synthetic experiments with the free rule, so that FedEXP and FedAvg promise exactly the same."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from dpfedexp.config import Settings
from dpfedexp.paper.comparison import line
from dpfedexp.paper.experiments import experiment, vary
from dpfedexp.paper.published import ALGORITHMS
from dpfedexp.paper.results.planned import Place, Result, TrainingRun, points
from dpfedexp.paper.results.spread import spread
from dpfedexp.processes import run_all
from dpfedexp.report.document import Chart, Panel, Section, Table

SETTINGS = {"cdp": "central DP", "ldp-gaussian": "local DP (Gaussian)"}
Key = tuple[str, str]


@dataclass(frozen=True)
class Demo:
    """Finished runs: (setting, algorithm) → one per seed."""

    settings: dict[Key, Settings]
    results: dict[Key, list[Result]]

    def finals(self, key: Key) -> list[float]:
        return [_final_distance(result) for result in self.results[key]]


def run(seeds: int) -> Demo:
    planned = {(setting, algorithm): _settings(setting, algorithm) for setting in SETTINGS for algorithm in ALGORITHMS}
    jobs = [(key, seed) for key in planned for seed in range(seeds)]
    runs = [TrainingRun(planned[key].with_seed(seed)) for key, seed in jobs]
    done = run_all(partial(_run, place=Place("cpu")), runs, "training")
    results: dict[Key, list[Result]] = {}
    for (key, _), result in zip(jobs, done, strict=True):
        results.setdefault(key, []).append(result)
    return Demo(planned, results)


def _final_distance(result: Result) -> float:
    value = points(result, "distance")[-1][1]
    return math.inf if value is None else value


def _settings(setting: str, algorithm: str) -> Settings:
    settings = experiment(f"synthetic-{setting}-{algorithm}")
    return vary(settings, {"algorithm.numerator": "free"}) if algorithm == "fedexp" else settings


def _run(run: TrainingRun, place: Place) -> Result:
    return run.run(place)


def sentence(demo: Demo) -> str:
    """What was seen."""
    parts = []
    for setting, place in (("cdp", "central"), ("ldp-gaussian", "local")):
        ours, theirs = demo.finals((setting, "fedexp")), demo.finals((setting, "fedavg"))
        closer = sum(a < b for a, b in zip(ours, theirs, strict=True))
        parts.append(
            f"with {place} DP FedEXP ends at {sum(ours) / sum(theirs):.2f} times FedAvg's distance "
            f"(closer in {closer} of {len(ours)} seeds)"
        )
    same = all(
        abs(_epsilon(demo, setting, "fedexp") - _epsilon(demo, setting, "fedavg")) < 1e-9 for setting in SETTINGS
    )
    tail = "at exactly the same ε, and with nothing to tune on the server." if same else "at the ε in the table."
    return f"Seen: {'; '.join(parts)}; {tail}"


def _epsilon(demo: Demo, setting: str, algorithm: str) -> float:
    epsilon: float = demo.results[setting, algorithm][0]["epsilon_total"]
    return epsilon


def section(demo: Demo, command: str) -> Section:
    rows = []
    for (setting, algorithm), results in demo.results.items():
        first, ends = results[0], spread(demo.finals((setting, algorithm)))
        rows.append(
            [
                SETTINGS[setting],
                ALGORITHMS[algorithm],
                f"{ends.mean:.2f} ± {ends.sd:.2f}",
                f"{first['epsilon_round']:.2f}",
                f"{first['epsilon_total']:.2f}",
            ]
        )
    columns = ["setting", "algorithm", "distance to the optimum", "ε per round", "ε total"]
    panels = [
        Panel(
            title,
            "round",
            "distance to the optimum",
            [line(demo.results[setting, a], "distance", label, a) for a, label in ALGORITHMS.items()],
            log_y=True,
        )
        for setting, title in SETTINGS.items()
    ]
    names = {key: f"{SETTINGS[key[0]]}, {ALGORITHMS[key[1]]}" for key in demo.settings}
    return Section(
        name="demo",
        title="DP-FedEXP on the paper's synthetic problem",
        text=[
            "Linear regression, 1000 clients with one sample each, 50 rounds of 20 local steps. Central DP (d = 500): a trusted "
            "server adds the noise. Local DP (d = 100): every client adds its own.",
            sentence(demo),
        ],
        tables=[Table("After 50 rounds", columns, rows, "Mean ± standard deviation over seeds; δ = 1e-5.")],
        charts=[
            Chart(
                "distance",
                "Distance to the optimum over rounds",
                "Mean over seeds, band of one standard deviation.",
                panels,
            )
        ],
        command=command,
        configuration={names[key]: settings.to_toml() for key, settings in demo.settings.items()},
        privacy={names[key]: results[0]["privacy"] for key, results in demo.results.items()},
    )


def write_summary(demo: Demo, path: Path) -> None:
    """One line per run: setting, algorithm, seed, final distance and ε."""
    lines = [
        {
            "setting": setting,
            "algorithm": algorithm,
            "seed": seed,
            "final_distance": _final_distance(result),
            "epsilon_total": result["epsilon_total"],
            "epsilon_round": result["epsilon_round"],
        }
        for (setting, algorithm), results in demo.results.items()
        for seed, result in enumerate(results)
    ]
    path.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
