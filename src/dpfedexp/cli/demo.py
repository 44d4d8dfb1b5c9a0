"""`dpfedexp demo`: the paper's synthetic experiments, with the free rule, so that FedEXP and FedAvg promise exactly the same."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfedexp.engine.plot import Chart, Panel, Series
from dpfedexp.errors import InputError
from dpfedexp.report.document import Section, Table

if TYPE_CHECKING:
    from dpfedexp.config import Settings

PLACES = {"cdp": "central DP", "ldp-gaussian": "local DP (Gaussian)"}
NAMES = {"fedexp": "DP-FedEXP", "fedavg": "DP-FedAvg", "scaffold": "DP-SCAFFOLD"}
Key = tuple[str, str]

PROBLEMS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "cdp": (500, 0.001, {"noise_multiplier": 5.0, "delta": 1e-5}),
    "ldp-gaussian": (100, 0.003, {"mechanism": "local-gaussian", "noise_multiplier": 0.7, "delta": 1e-5}),
}
"""Dimension, local rate, and what the algorithms of a setting share."""
ALGORITHMS: dict[Key, dict[str, Any]] = {
    ("cdp", "fedexp"): {"name": "cdp_fedexp", "clip": 0.3, "numerator": "free", "step": "paper"},
    ("cdp", "fedavg"): {"name": "dp_fedavg", "clip": 3.0, "mechanism": "central-gaussian"},
    ("cdp", "scaffold"): {"name": "dp_scaffold", "clip": 1.0, "mechanism": "central-gaussian"},
    ("ldp-gaussian", "fedexp"): {"name": "ldp_fedexp", "clip": 0.3, "numerator": "free", "step": "paper"},
    ("ldp-gaussian", "fedavg"): {"name": "dp_fedavg", "clip": 3.0},
    ("ldp-gaussian", "scaffold"): {"name": "dp_scaffold", "clip": 0.3},
}


@dataclass(frozen=True)
class Trained:
    """A finished run: the distance to the optimum after each evaluated round, None where the run diverged, and its promise."""

    rounds: list[int]
    distances: list[float | None]
    epsilon_round: float
    epsilon_total: float
    privacy: str

    @property
    def final_distance(self) -> float:
        value = self.distances[-1]
        return math.inf if value is None else value


Runs = dict[Key, list[Trained]]
"""(setting, algorithm) → one run per seed."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the summary, the figure and the report.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
) -> None:
    """DP-FedEXP beside DP-FedAvg and DP-SCAFFOLD on the paper's synthetic problem: what it gains, and what privacy it costs."""
    from dpfedexp.machine import run_all
    from dpfedexp.report.document import wide
    from dpfedexp.report.page import report

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(out)!r} can't be written: {error.strerror}.") from None
    planned = {key: settings(*key) for key in ALGORITHMS}
    jobs = [(key, seed) for key in planned for seed in range(seeds)]
    runs: Runs = {}
    done = run_all(train, [planned[key].with_seed(seed) for key, seed in jobs], "training")
    for (key, _), trained in zip(jobs, done, strict=True):
        runs.setdefault(key, []).append(trained)
    section = _section(planned, runs, f"dpfedexp demo --seeds {seeds}")
    console = wide()
    setup, *seen = section.text
    replace(section, text=[setup]).show(console)
    console.print(*seen, highlight=False)
    summary = out / "summary.json"
    lines = [
        {
            "setting": setting,
            "algorithm": algorithm,
            "seed": seed,
            "final_distance": run.final_distance,
            "epsilon_total": run.epsilon_total,
            "epsilon_round": run.epsilon_round,
        }
        for (setting, algorithm), group in runs.items()
        for seed, run in enumerate(group)
    ]
    summary.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")
    written = [summary, *section.save(out)]
    console.print("Written: " + ", ".join(f"[bold]{path}[/]" for path in written), highlight=False)
    console.print(f"Report: [bold]{report(out)}[/]", highlight=False)


def settings(setting: str, algorithm: str) -> Settings:
    """The paper's settings of a run, but with the free rule for FedEXP."""
    from dpfedexp.config import parse

    dimension, lr, shared = PROBLEMS[setting]
    return parse(
        {
            "data": {"kind": "synthetic", "clients": 1000, "dimension": dimension},
            "algorithm": {**shared, **ALGORITHMS[setting, algorithm]},
            "local": {"lr": lr, "steps": 20},
            "run": {"rounds": 50},
        }
    )


def train(settings: Settings) -> Trained:
    """A whole simulated run on the CPU."""
    from dpfedexp.config import problem
    from dpfedexp.engine.advice import silence
    from dpfedexp.engine.train import train as run_training
    from dpfedexp.files import finite

    built = problem.build(settings)
    done = run_training(
        built.model,
        built.federation,
        settings.build_algorithm(),
        local=settings.build_local(),
        participation=settings.build_participation(),
        evaluate=built.evaluate,
        progress=False,
        on_advice=silence,
        execution=replace(settings.build_execution(), device="cpu"),
        **settings.run_options(),
    )
    evaluated = [record for record in done.history if "distance" in record]
    return Trained(
        [record["round"] for record in evaluated],
        [finite(record["distance"]) for record in evaluated],
        done.privacy.epsilon_round,
        done.privacy.epsilon_total,
        done.privacy.text,
    )


def _sentence(runs: Runs) -> str:
    """What was seen."""
    parts = []
    for setting, place in (("cdp", "central"), ("ldp-gaussian", "local")):
        ours, theirs = ([run.final_distance for run in runs[setting, name]] for name in ("fedexp", "fedavg"))
        closer = sum(a < b for a, b in zip(ours, theirs, strict=True))
        parts.append(
            f"with {place} DP FedEXP ends at {sum(ours) / sum(theirs):.2f} times FedAvg's distance "
            f"(closer in {closer} of {len(ours)} seeds)"
        )
    same = all(
        abs(runs[setting, "fedexp"][0].epsilon_total - runs[setting, "fedavg"][0].epsilon_total) < 1e-9
        for setting in PLACES
    )
    tail = "at exactly the same ε, and with nothing to tune on the server." if same else "at the ε in the table."
    return f"Seen: {'; '.join(parts)}; {tail}"


def _section(planned: dict[Key, Settings], runs: Runs, command: str) -> Section:
    rows = []
    for (setting, algorithm), group in runs.items():
        ends = [run.final_distance for run in group]
        sd = statistics.stdev(ends) if len(ends) > 1 and all(map(math.isfinite, ends)) else 0.0
        rows.append(
            [
                PLACES[setting],
                NAMES[algorithm],
                f"{statistics.fmean(ends):.2f} ± {sd:.2f}",
                f"{group[0].epsilon_round:.2f}",
                f"{group[0].epsilon_total:.2f}",
            ]
        )
    columns = ["setting", "algorithm", "distance to the optimum", "ε per round", "ε total"]
    panels = [
        Panel(
            title,
            "round",
            "distance to the optimum",
            [_line(runs[setting, algorithm], name, algorithm) for algorithm, name in NAMES.items()],
            log_y=True,
        )
        for setting, title in PLACES.items()
    ]
    names = {key: f"{PLACES[key[0]]}, {NAMES[key[1]]}" for key in planned}
    return Section(
        name="demo",
        title="DP-FedEXP on the paper's synthetic problem",
        text=[
            "Linear regression, 1000 clients with one sample each, 50 rounds of 20 local steps. Central DP (d = 500): a trusted "
            "server adds the noise. Local DP (d = 100): every client adds its own.",
            _sentence(runs),
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
        configuration={names[key]: given.to_toml() for key, given in planned.items()},
        privacy={names[key]: group[0].privacy for key, group in runs.items()},
    )


def _line(group: Sequence[Trained], name: str, colour: str) -> Series:
    """Mean over seeds, with a band of one standard deviation; a run that diverged stays at its last value."""
    import numpy as np

    kept = [accumulate(run.distances, lambda last, new: last if new is None else new, initial=0.0) for run in group]
    values = np.array([list(one)[1:] for one in kept])
    mean = values.mean(0)
    sd = values.std(0, ddof=1) if len(values) > 1 else np.zeros_like(mean)
    return Series(name, group[0].rounds, mean.tolist(), (mean - sd).tolist(), (mean + sd).tolist(), colour)
