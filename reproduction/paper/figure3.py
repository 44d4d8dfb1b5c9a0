"""Fig. 3: η_g over rounds, from the runs of Fig. 1."""

from __future__ import annotations

import numpy as np

from dpfedexp.engine.plot import Chart, Panel
from dpfedexp.report.document import Claim, Section, Table
from reproduction.paper import comparison
from reproduction.paper.comparison import Comparison, line
from reproduction.paper.published import SETTINGS
from reproduction.paper.results.collected import Results
from reproduction.paper.results.planned import PlannedRun, points
from reproduction.paper.results.size import Size

PROBLEMS = {"synthetic": "Synthetic", "mnist": "MNIST"}


SHOWN = ("fedexp",)


def planned(size: Size) -> list[PlannedRun]:
    problems = (problem for problem in PROBLEMS if size.includes(problem))
    return [run for p in problems for run in comparison.planned(p, size, ("round", "eta_g"), SHOWN)]


def section(size: Size, results: Results) -> Section:
    seen = {problem: Comparison.of(problem, size, results, SHOWN) for problem in PROBLEMS if size.includes(problem)}
    panels = [
        Panel(
            PROBLEMS[problem],
            "round",
            "η_g",
            [line(shown.results[s, "fedexp"], "eta_g", name, s) for s, name in SETTINGS.items()],
            log_y=True,
        )
        for problem, shown in seen.items()
    ]
    chart = Chart(
        "step-history", "η_g of DP-FedEXP over rounds", "Mean over seeds, band of one standard deviation.", panels
    )
    return Section(
        name="step-history",
        title="η_g over rounds (Fig. 3)",
        text=["The global step size of DP-FedEXP in the runs of Fig. 1; DP-FedAvg's and DP-SCAFFOLD's is 1."],
        tables=[_table(seen)],
        charts=[chart],
        claims=_claims(seen),
        notes=size.notes,
        command=size.command("step-history"),
        configuration={
            f"{PROBLEMS[problem]}, {SETTINGS[s]}": runs.settings[s, "fedexp"][0].to_toml()
            for problem, runs in seen.items()
            for s in SETTINGS
        },
    )


def _mean(comparison: Comparison, setting: str) -> np.ndarray:
    runs = comparison.results[setting, "fedexp"]
    mean: np.ndarray = np.array([[eta for _, eta in points(run, "eta_g")] for run in runs], dtype=float).mean(0)
    return mean


def _table(seen: dict[str, Comparison]) -> Table:
    rows = []
    for problem, runs in seen.items():
        for setting, name in SETTINGS.items():
            eta = _mean(runs, setting)
            shown = [eta[0], eta[len(eta) // 4], eta[len(eta) // 2], eta[-1]]
            rows.append([PROBLEMS[problem], name, *(f"{value:.2f}" for value in shown)])
    note = "The paper shows this in a figure and prints no values."
    return Table(
        "η_g, mean over seeds", ["problem", "setting", "first round", "at ¼", "at ½", "last round"], rows, note
    )


def _claims(seen: dict[str, Comparison]) -> list[Claim]:
    claims = []
    for setting, name in SETTINGS.items() if "synthetic" in seen else ():
        eta = _mean(seen["synthetic"], setting)
        fifth = max(1, len(eta) // 5)
        early, late = eta[:fifth].mean(), eta[-fifth:].mean()
        claims.append(
            Claim(
                f"Synthetic, {name}: η_g falls as training goes on (first fifth of the rounds against the last)",
                f"{early:.2f} → {late:.2f}",
                bool(late < early),
            )
        )
    return claims
