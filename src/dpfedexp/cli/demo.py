"""`dpfedexp demo`: the paper's synthetic experiments, with the free rule, so that FedEXP and FedAvg have the same ε."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpfedexp.engine.plot import Chart, Panel
from dpfedexp.files import writing
from dpfedexp.report.document import Section, Table

if TYPE_CHECKING:
    from dpfedexp.accounting import PrivacyStatement
    from dpfedexp.config import Settings

PLACES = {"cdp": "central DP", "ldp-gaussian": "local DP (Gaussian)"}
NAMES = {"fedexp": "DP-FedEXP", "fedavg": "DP-FedAvg", "scaffold": "DP-SCAFFOLD"}
Key = tuple[str, str]

PROBLEMS: dict[str, tuple[int, float, dict[str, Any]]] = {
    "cdp": (500, 0.001, {"noise_multiplier": 5.0, "delta": 1e-5}),
    "ldp-gaussian": (100, 0.003, {"mechanism": "local-gaussian", "noise_multiplier": 0.7, "delta": 1e-5}),
}
"""Setting → (dimension, local rate, settings that its algorithms share)."""
ALGORITHMS: dict[Key, dict[str, Any]] = {
    ("cdp", "fedexp"): {"name": "cdp_fedexp", "clip": 0.3, "numerator": "free", "step": "paper"},
    ("cdp", "fedavg"): {"name": "dp_fedavg", "clip": 3.0, "mechanism": "central-gaussian"},
    ("cdp", "scaffold"): {"name": "dp_scaffold", "clip": 1.0, "mechanism": "central-gaussian"},
    ("ldp-gaussian", "fedexp"): {"name": "ldp_fedexp", "clip": 0.3, "numerator": "free", "step": "paper"},
    ("ldp-gaussian", "fedavg"): {"name": "dp_fedavg", "clip": 3.0},
    ("ldp-gaussian", "scaffold"): {"name": "dp_scaffold", "clip": 0.3},
}


Distances = dict[int, float]
"""The distance to the optimum by evaluated round."""
Runs = dict[Key, list[tuple[Distances, "PrivacyStatement"]]]
"""(setting, algorithm) → one run per seed."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results, the figure and the report.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
) -> None:
    """Compare DP-FedEXP with DP-FedAvg and DP-SCAFFOLD on the paper's synthetic problem."""
    from dpfedexp.machine import run_jobs
    from dpfedexp.report.document import wide
    from dpfedexp.report.page import report

    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    planned = {key: settings(*key) for key in ALGORITHMS}
    done = run_jobs(train, [one.with_seed(seed) for one in planned.values() for seed in range(seeds)], "training")
    runs: Runs = {key: done[number * seeds : (number + 1) * seeds] for number, key in enumerate(planned)}
    section = _section(planned, runs, f"dpfedexp demo --seeds {seeds}")
    console = wide()
    section.show(console)
    console.print("Written: " + ", ".join(f"[bold]{path}[/]" for path in section.save(out)), highlight=False)
    console.print(f"Report: [bold]{report(out)}[/]", highlight=False)


def settings(setting: str, algorithm: str) -> Settings:
    """Return the paper's settings of a run, but with the free rule for FedEXP."""
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


def train(settings: Settings) -> tuple[Distances, PrivacyStatement]:
    from dpfedexp.cli.train import execute
    from dpfedexp.engine.advice import silence

    on_cpu = settings.model_copy(update={"run": settings.run.model_copy(update={"device": "cpu"})})
    done = execute(on_cpu, None, progress=False, on_advice=silence)
    return {record["round"]: record["distance"] for record in done.history if "distance" in record}, done.privacy


def _ends(group: list[tuple[Distances, PrivacyStatement]]) -> list[float]:
    """Return the last distance of each run; infinite if the run diverged."""
    last = [[*distances.values()][-1] for distances, _ in group]
    return [value if math.isfinite(value) else math.inf for value in last]


def _sentence(runs: Runs) -> str:
    """Return a sentence with the results of FedEXP against FedAvg, which have the same noise and so the same ε."""
    parts = []
    for setting, place in (("cdp", "central"), ("ldp-gaussian", "local")):
        ours, theirs = (_ends(runs[setting, name]) for name in ("fedexp", "fedavg"))
        closer = sum(a < b for a, b in zip(ours, theirs, strict=True))
        parts.append(
            f"with {place} DP FedEXP ends at {sum(ours) / sum(theirs):.2f} times FedAvg's distance "
            f"(closer in {closer} of {len(ours)} seeds)"
        )
    return f"Seen: {'; '.join(parts)}; at exactly the same ε, and with nothing to tune on the server."


def _section(planned: dict[Key, Settings], runs: Runs, command: str) -> Section:
    from dpfedexp.cli.trials import band

    rows = []
    for (setting, algorithm), group in runs.items():
        ends, (_, privacy) = _ends(group), group[0]
        sd = stdev(ends) if len(ends) > 1 and all(map(math.isfinite, ends)) else 0.0
        spent = (f"{epsilon:.2f}" for epsilon in (privacy.epsilon_round, privacy.epsilon_total))
        rows.append([PLACES[setting], NAMES[algorithm], f"{fmean(ends):.2f} ± {sd:.2f}", *spent])
    distance = "distance to the optimum"
    panels = []
    for setting, title in PLACES.items():
        lines = [
            replace(band(name, [distances for distances, _ in runs[setting, algorithm]]), color=algorithm)
            for algorithm, name in NAMES.items()
        ]
        panels.append(Panel(title, "round", distance, lines, log_y=True))
    caption = "Mean over seeds, band of one standard deviation."
    names = {key: f"{PLACES[key[0]]}, {NAMES[key[1]]}" for key in planned}
    return Section(
        name="demo",
        title="DP-FedEXP on the paper's synthetic problem",
        text=[
            "Linear regression, 1000 clients with one sample each, 50 rounds of 20 local steps. Central DP (d = 500): a trusted "
            "server adds the noise. Local DP (d = 100): every client adds its own.",
            _sentence(runs),
        ],
        tables=[
            Table(
                "After 50 rounds",
                ["setting", "algorithm", distance, "ε per round", "ε total"],
                rows,
                "Mean ± standard deviation over seeds; δ = 1e-5.",
            )
        ],
        charts=[Chart("distance", "Distance to the optimum over rounds", caption, panels)],
        command=command,
        configuration={names[key]: given.to_toml() for key, given in planned.items()},
        privacy={names[key]: group[0][1].text for key, group in runs.items()},
    )
