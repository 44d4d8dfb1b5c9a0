"""Table 2: the paper's search for (η_l, C), over its grids; a point is the mean of a few seeds."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar

from dpfedexp.config import Settings
from dpfedexp.engine.plot import Chart, Panel, Series
from dpfedexp.files import finite
from dpfedexp.report.document import Claim, Section, Table
from reproduction.paper.experiments import experiment, vary
from reproduction.paper.published import ALGORITHMS, CLIP_GRID, RATE_GRID, SETTINGS, TABLE_2
from reproduction.paper.results.collected import Results
from reproduction.paper.results.full_settings import in_full
from reproduction.paper.results.planned import Place, PlannedRun, Result, TrainingRun
from reproduction.paper.results.size import Size
from reproduction.paper.results.spread import final


@dataclass(frozen=True)
class GridPoint:
    """A configuration for the seeds 0 … `seeds` − 1. Its record keeps the means and what each seed gave, and no curves."""

    settings: Settings
    seeds: int
    name: str = field(default="", compare=False)

    curves: ClassVar[tuple[str, ...]] = ()
    seed: ClassVar[None] = None

    @property
    def full_settings(self) -> dict[str, Any]:
        return in_full(self.settings.with_seed(0)) | {"grid_point": {"seeds": self.seeds}}

    @property
    def needs_images(self) -> bool:
        return self._first.needs_images

    @property
    def cost(self) -> float:
        return self._first.cost * self.seeds

    @property
    def problem(self) -> str:
        return self._first.problem

    @property
    def _first(self) -> TrainingRun:
        return TrainingRun(self.settings.with_seed(0))

    def run(self, place: Place) -> Result:
        results = [TrainingRun(self.settings.with_seed(seed)).run(place) for seed in range(self.seeds)]
        finals: dict[str, float | None] = {}
        for metric in results[0]["finals"]:
            values = [final(result, metric) for result in results]
            finals[metric] = finite(fmean(values)) if all(map(math.isfinite, values)) else None
            finals |= {f"{metric}, seed {seed}": finite(value) for seed, value in enumerate(values)}
        return {**results[0], "finals": finals, "curves": {}}


SEEDS = {"synthetic": 3, "mnist": 1}
CRITERION = {"synthetic": "nonprivate_training_loss", "mnist": "test_accuracy"}
PROBLEMS = {"synthetic": "Synthetic", "mnist": "MNIST"}
Key = tuple[str, str, str]
Point = tuple[float, float]


def searched(size: Size) -> list[Key]:
    """What is searched: everything, or only the paper's central synthetic search when quick."""
    if size.quick:
        return [("synthetic", "cdp", "fedexp"), ("synthetic", "cdp", "fedavg")]
    return [key for key in TABLE_2 if size.includes(key[0])]


def points(key: Key, size: Size) -> dict[Point, GridPoint]:
    """(η_l, C) → the runs at that point."""
    name = "-".join(key)
    base = experiment(name)
    rates = RATE_GRID[key[0]][1:4] if size.quick else RATE_GRID[key[0]]
    seeds = 1 if size.quick else min(size.seeds, SEEDS[key[0]])
    return {
        (rate, clip): GridPoint(
            vary(base, {"local.lr": rate, "algorithm.clip": clip}), seeds, f"{name}, η_l = {rate:g}, C = {clip:g}"
        )
        for rate in rates
        for clip in CLIP_GRID
    }


def planned(size: Size) -> list[PlannedRun]:
    return [point for key in searched(size) for point in points(key, size).values()]


@dataclass(frozen=True)
class Search:
    """The criterion at every point: training loss (smaller is better) or test accuracy (larger is better)."""

    key: Key
    values: dict[Point, float]

    def _order(self, point: Point) -> float:
        """Smaller is better, whatever the criterion; what diverged comes last."""
        value = self.values[point]
        if not math.isfinite(value):
            return math.inf
        return -value if self.key[0] == "mnist" else value

    @property
    def ranking(self) -> list[Point]:
        return sorted(self.values, key=self._order)

    @property
    def best(self) -> Point:
        return self.ranking[0]

    @property
    def published(self) -> Point:
        return TABLE_2[self.key]

    @property
    def rank_of_published(self) -> int | None:
        return self.ranking.index(self.published) + 1 if self.published in self.values else None


def search(key: Key, size: Size, results: Results) -> Search:
    metric = CRITERION[key[0]]
    return Search(key, {at: final(results[point], metric) for at, point in points(key, size).items()})


def section(size: Size, results: Results) -> Section:
    done = [search(key, size, results) for key in searched(size)]
    return Section(
        name="grid",
        title="The search for η_l and C (Table 2)",
        text=[
            "Every point of the paper's grids, by its criterion over the last 5 rounds: training loss, mean of ½(xᵀw − y)² over "
            "the clients, on the synthetic problem (3 seeds), test accuracy on MNIST (1 seed)."
        ],
        tables=[_selected(done), *(_grid(one) for one in done)],
        charts=[_chart(problem, group) for problem in PROBLEMS if (group := [s for s in done if s.key[0] == problem])],
        claims=_claims(done),
        notes=[
            *(["Quick: CDP on the synthetic problem only, one seed, three of the five rates."] if size.quick else []),
            *NOTES,
        ],
        command=size.command("grid"),
        configuration={_name(one.key): size.runs(experiment("-".join(one.key)))[0].to_toml() for one in done},
        data={"-".join(one.key): _data(one) for one in done},
    )


def _name(key: Key) -> str:
    return f"{PROBLEMS[key[0]]}, {SETTINGS[key[1]]}, {ALGORITHMS[key[2]]}"


def _show(value: float, problem: str) -> str:
    if not math.isfinite(value):
        return "diverged"
    return f"{100 * value:.2f}" if problem == "mnist" else f"{value:.4g}"


def _selected(done: list[Search]) -> Table:
    rows = []
    for one in done:
        problem, setting, algorithm = one.key
        rank = one.rank_of_published
        rows.append(
            [
                f"{PROBLEMS[problem]}, {SETTINGS[setting]}",
                ALGORITHMS[algorithm],
                f"{one.best[0]:g}, {one.best[1]:g}",
                f"{one.published[0]:g}, {one.published[1]:g}",
                "same" if one.best == one.published else "other",
                _show(one.values[one.best], problem),
                "–" if rank is None else _show(one.values[one.published], problem),
                "–" if rank is None else f"{rank} of {len(one.values)}",
            ]
        )
    columns = [
        "problem",
        "algorithm",
        "selected η_l, C",
        "paper",
        "",
        "criterion there",
        "at the paper's",
        "paper's rank",
    ]
    return Table("Table 2: selected η_l and C", columns, rows, "Criterion: training loss, or test accuracy in percent.")


def _grid(one: Search) -> Table:
    problem = one.key[0]
    clips = sorted({clip for _, clip in one.values})
    rows = []
    for rate in sorted({rate for rate, _ in one.values}):
        marks = [("*" if (rate, clip) == one.best else "") for clip in clips]
        rows.append(
            [f"{rate:g}", *(_show(one.values[rate, c], problem) + m for c, m in zip(clips, marks, strict=True))]
        )
    return Table(_name(one.key), ["η_l", *(f"C = {clip:g}" for clip in clips)], rows, "* selected")


def _chart(problem: str, group: list[Search]) -> Chart:
    panels = []
    for one in group:
        lines = []
        for rate in sorted({rate for rate, _ in one.values}):
            finite = [
                (c, one.values[rate, c]) for r, c in one.values if r == rate and math.isfinite(one.values[rate, c])
            ]
            if finite:
                factor = 100.0 if problem == "mnist" else 1.0
                lines.append(Series(f"η_l = {rate:g}", [c for c, _ in finite], [factor * v for _, v in finite]))
        title = f"{SETTINGS[one.key[1]]}, {ALGORITHMS[one.key[2]]}"
        label = "test accuracy in %" if problem == "mnist" else "training loss"
        panels.append(Panel(title, "clip C", label, lines, log_x=True, log_y=problem == "synthetic"))
    return Chart(
        f"grid-{problem}", f"{PROBLEMS[problem]}: the criterion over the grid", "A line per local rate.", panels
    )


def _claims(done: list[Search]) -> list[Claim]:
    claims = []
    for one in done:
        if one.key[2] != "fedexp":
            continue
        name = f"{PROBLEMS[one.key[0]]}, {SETTINGS[one.key[1]]}"
        at_published = one.values.get(one.published, math.inf)
        seen = f"({one.best[0]:g}, {one.best[1]:g}), {_show(one.values[one.best], one.key[0])}"
        if one.best != one.published:
            seen += f"; {_show(at_published, one.key[0])} at the paper's"
        text = f"{name}: the search selects the paper's (η_l, C) = ({one.published[0]:g}, {one.published[1]:g}) for DP-FedEXP"
        claims.append(Claim(text, seen, one.best == one.published))
    return claims


def _data(one: Search) -> list[dict[str, Any]]:
    return [
        {"lr": rate, "clip": clip, "criterion": value if math.isfinite(value) else None}
        for (rate, clip), value in one.values.items()
    ]


NOTES = (
    "The appendix prints the two grids of η_l the other way round; they are used as they must be meant. "
    "Selecting by the training loss or by trying settings on the same clients is not private, in the paper as here.",
)
