"""The suite's page: tables that lead with ε = 8, the claims, the curve against ε and the grid of local rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from dpfedexp.engine.plot import Chart, Panel, Series
from dpfedexp.files import finite, replace_text
from dpfedexp.report.document import Claim, Section, Table
from reproduction.suite import table
from reproduction.suite.contenders import CONTENDERS, DELTA
from reproduction.suite.problem import Problem
from reproduction.suite.problems import PROBLEMS
from reproduction.suite.suite_plan import HEADLINE, LEADING, RIVALS, Size, best_rate, grid
from reproduction.suite.table import Cell, Difference, Gap, Lookup

CHART, GRID_CHART = "suite-epsilon", "suite-rates"
SHOWN_LOSS = 2.0
"""A loss above so many times the best is beyond the top of a figure."""

TEXT = (
    "Each row is a federation, trained for its fixed number of rounds of full-batch local steps under central Gaussian noise, with "
    "an adaptive clip and δ = 1e-5. A cell is the test metric of the model that a run releases at its end: mean ± standard error "
    "over seeds. Natural clients (people, schools, roles) are tested on clients who took no part.",
    "Selection on test data: every contender but fit uses the local rate at which FedAvg is best on the problem's grid at ε = 8, "
    "and FedAvg and FedAdam, tuned, show the best of five server rates [in brackets]. Both choices are made on the test data, and "
    "nobody pays for them in ε: the rivals are shown better than they could be had.",
)


def section(
    problems: Sequence[str], size: Size, lookup: Lookup, command: str = "python -m reproduction suite"
) -> Section:
    """What the recorded runs say; a problem whose grid of local rates is not complete is not shown."""
    found = {PROBLEMS[name]: best_rate(PROBLEMS[name], lookup, size) for name in problems}
    rates = {problem: lr for problem, lr in found.items() if lr is not None}
    names = (*HEADLINE, *RIVALS)
    tables, gains = [], {}
    for epsilon in size.epsilons:
        made, gains[epsilon] = table.at_epsilon(rates, epsilon, names, size, lookup)
        tables.append(made)
    for epsilon in sorted(size.headline_epsilons):
        made, gains[epsilon] = table.at_epsilon(rates, epsilon, HEADLINE, size, lookup)
        tables.append(made)
    automatic, gaps = table.automatic_rates(list(rates), size.epsilons, size, lookup)
    if gaps:
        tables.append(automatic)
    charts = [_against_epsilon(rates, size, lookup), _over_rates(rates, size, lookup)] if rates else []
    return Section(
        "suite",
        "A suite of real federations",
        TEXT,
        [*(one for one in map(_tidy, tables) if len(one.columns) > 2), _problems(rates)],
        charts,
        [*_never_worse(gains), *_automatic(gaps)],
        [f"{one.label} is not shown: {one.why_missing.rstrip('.')}." for one in CONTENDERS.values() if one.why_missing],
        command,
        data=curves(rates, size, lookup),
    )


def _tidy(one: Table) -> Table:
    """Without the columns of contenders that have no run."""
    kept = [at for at in range(len(one.columns)) if at < 2 or any(row[at] != "–" for row in one.rows)]
    return Table(one.title, [one.columns[at] for at in kept], [[row[at] for at in kept] for row in one.rows], one.note)


def _problems(rates: dict[Problem, float]) -> Table:
    rows = [
        [problem.name, problem.kind, "yes" if problem.natural else "no", problem.summary, f"{lr:g}"]
        for problem, lr in rates.items()
    ]
    return Table("The problems", ["problem", "kind", "natural clients", "what it is", "local rate"], rows)


def _never_worse(gains: dict[float, dict[str, Difference]]) -> list[Claim]:
    judged = [(epsilon, name, gain) for epsilon, of in gains.items() for name, gain in of.items() if gain.seeds > 1]
    if not judged:
        return []
    worse = [f"{name} at ε = {epsilon:g}" for epsilon, name, gain in judged if gain.worse]
    return [
        Claim(
            "Safe FedEXP is nowhere worse than FedAvg at the same local rate by more than one standard error",
            f"{len(judged) - len(worse)} of {len(judged)}" + (f"; worse: {', '.join(worse)}" if worse else ""),
            not worse,
        )
    ]


def _automatic(gaps: list[Gap]) -> list[Claim]:
    if not gaps:
        return []
    wide = [f"{gap.problem.name} at ε = {gap.epsilon:g}" for gap in gaps if gap.too_large]
    runs, collapses = sum(len(gap.reached) for gap in gaps), sum(gap.collapses for gap in gaps)
    return [
        Claim(
            "The automatic rate is within 1 point (2% of the loss) of the best of nine rates",
            f"{len(gaps) - len(wide)} of {len(gaps)}" + (f"; not: {', '.join(wide)}" if wide else ""),
            not wide,
        ),
        Claim("No run with the automatic rate collapses", f"{collapses} of {runs} runs", collapses == 0),
    ]


def _against_epsilon(rates: dict[Problem, float], size: Size, lookup: Lookup) -> Chart:
    panels = []
    for problem, lr in rates.items():
        series = []
        for name in (*HEADLINE, *RIVALS):
            epsilons = sorted({*size.epsilons, *(size.headline_epsilons if name in HEADLINE else ())})
            cells = {e: table.cell(problem, name, e, lr, size, lookup) for e in epsilons}
            series += _series(name, {e: one for e, one in cells.items() if one is not None})
        panels.append(_panel(problem, "ε", series))
    return Chart(
        CHART,
        "Against ε",
        "Mean over seeds, band of one standard error. A loss above twice the best of its panel is not drawn; the tables have it.",
        panels,
    )


def _series(name: str, cells: dict[float, Cell]) -> list[Series]:
    shown = {x: one for x, one in cells.items() if math.isfinite(one.mean)}
    if not shown:
        return []
    contender, y = CONTENDERS[name], [one.mean for one in shown.values()]
    low = [one.mean - one.error for one in shown.values()]
    high = [one.mean + one.error for one in shown.values()]
    return [Series(contender.label, list(shown), y, low, high, contender.color, dashed=name not in HEADLINE)]


def _over_rates(rates: dict[Problem, float], size: Size, lookup: Lookup) -> Chart:
    panels = []
    for problem in rates:
        series = []
        for name, epsilon in (("fedavg", LEADING), *(("safe", epsilon) for epsilon in size.epsilons)):
            runs = {run[0].lr: table.values(run, lookup) for run in grid(problem, name, epsilon, size)}
            points = {lr: fmean(found) for lr, found in runs.items() if lr is not None and found}
            label, color = f"{CONTENDERS[name].label}, ε = {epsilon:g}", CONTENDERS[name].color
            if points:
                shown = color if epsilon == LEADING else ""
                series.append(Series(label, list(points), list(points.values()), color=shown, dashed=not shown))
        panels.append(_panel(problem, "local rate", series))
    return Chart(
        GRID_CHART,
        "Over the local rate",
        "Mean over seeds. A loss above twice the best of its panel is not drawn.",
        panels,
    )


def _panel(problem: Problem, x_label: str, series: Sequence[Series]) -> Panel:
    """Losses far above the best are left out: one that exploded would flatten all others."""
    label = "test accuracy in %" if problem.higher_is_better else "test loss"
    if not problem.higher_is_better:
        best = min((y for one in series for y in one.y), default=0.0)
        series = [_below(one, SHOWN_LOSS * best) for one in series]
    return Panel(problem.name, x_label, label, [one for one in series if one.x], log_x=True)


def _below(series: Series, top: float) -> Series:
    kept = [at for at, y in enumerate(series.y) if y <= top]

    def pick(numbers: Sequence[float] | None) -> list[float] | None:
        return None if numbers is None else [min(numbers[at], top) for at in kept]

    x = [series.x[at] for at in kept]
    return Series(
        series.name, x, pick(series.y) or [], pick(series.low), pick(series.high), series.color, series.dashed
    )


def write_markdown(made: Section, folder: Path) -> Path:
    """`suite.md` beside the figures."""
    path = folder / "suite.md"
    replace_text(path, markdown(made))
    return path


def markdown(made: Section, pictures: Sequence[str] = ()) -> str:
    """A section as text; `pictures` are files in its folder that are not charts of the section."""
    lines = [f"# {made.title}", "", *(f"{paragraph}\n" for paragraph in made.text)]
    for claim in made.claims:
        lines.append(f"- {'holds' if claim.holds else '**does not hold**'}: {claim.text}: {claim.seen}.")
    lines += [line for picture in pictures for line in ("", f"![{made.title}]({picture})")]
    for one in made.tables:
        lines += ["", f"## {one.title}", "", _row(one.columns), _row(["---"] * len(one.columns)), *map(_row, one.rows)]
    for chart in made.charts:
        lines += ["", f"## {chart.title}", "", f"![{chart.title}]({chart.name}.svg)", "", chart.caption]
    return "\n".join([*lines, "", *(f"{note}\n" for note in made.notes), f"Made by `{made.command}`.", ""])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in cells)} |"


def curves(rates: dict[Problem, float], size: Size, lookup: Lookup) -> dict[str, Any]:
    """Problem → contender → ε, mean, standard error, seeds and the server rate that was best; a mean of None diverged.

    Args:
        rates: the problems that are shown, and the local rate of each.
        size: how much was run.
        lookup: the recorded runs.
    """
    return {
        "delta": DELTA,
        "adjacency": "replace-one",
        "problems": [
            {
                "name": problem.name,
                "kind": problem.kind,
                "natural": problem.natural,
                "summary": problem.summary,
                "higher_is_better": problem.higher_is_better,
                "contenders": [
                    {
                        "label": CONTENDERS[name].label,
                        "color": CONTENDERS[name].color,
                        "server_rates": len(CONTENDERS[name].server_rates),
                        "points": points,
                    }
                    for name in (*HEADLINE, *RIVALS)
                    if (points := _points(problem, name, lr, size, lookup))
                ],
            }
            for problem, lr in rates.items()
        ],
    }


def _points(problem: Problem, name: str, lr: float, size: Size, lookup: Lookup) -> list[dict[str, Any]]:
    points = []
    for epsilon in sorted({*size.epsilons, *(size.headline_epsilons if name in HEADLINE else ())}):
        cell = table.cell(problem, name, epsilon, lr, size, lookup)
        if cell is not None:
            mean, error = (finite(number) for number in (cell.mean, cell.error))
            seeds = len(cell.values)
            points.append(
                {"epsilon": epsilon, "mean": mean, "error": error, "seeds": seeds, "server_rate": cell.server_rate}
            )
    return points
