"""`fit` against rivals that are tuned on the test data, on one half of the problems: the runs, the table and one figure.

A rival is an algorithm at a local rate and a server rate. The best of them on a problem at an ε is chosen on the test data, which
is not possible in practice. `fit` chooses everything itself, under the same ε.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from dpfedexp.core import local_rate, step_size
from dpfedexp.engine.fit import FIT_LOCAL, FIT_ROUNDS
from dpfedexp.engine.plot import CYCLE, NAMED, save_figure
from dpfedexp.files import replace_text
from dpfedexp.report.document import Claim, Section, Table
from reproduction.suite import suite_page, table
from reproduction.suite.command import check_names, is_there
from reproduction.suite.contenders import CONTENDERS
from reproduction.suite.problem import Problem
from reproduction.suite.problems import HALVES, PROBLEMS
from reproduction.suite.suite_plan import SuiteRun
from reproduction.suite.suite_runs import Lines, Outcome, Place, run_stages
from reproduction.suite.table import Lookup, number

EPSILONS = (2.0, 8.0, 1.0, 16.0, 4.0)
"""In the order in which they are run."""
SHOWN = (2.0, 8.0)
"""Those of the figure."""
SEEDS = 2
RIVALS: tuple[tuple[str, float | None], ...] = (
    ("fedavg", None),
    ("fedavg-tuned", 2.0),
    ("fedavg-tuned", 4.0),
    ("safe", None),
)
"""DP-FedAvg at the server rates 1, 2 and 4, and safe DP-FedEXP; each at five local rates over two decades."""
MOST_LOST = 3.0
"""Points that `fit` may lose anywhere; 2% of a loss count as a point."""
LEAST_SHOWN = 60.0
"""Where the figure's axis begins, in percent of the best rival; a setting below that is drawn there."""


@dataclass(frozen=True)
class FitRun(SuiteRun):
    """A run of `fit`, whose result depends on the constants of the rate rule too."""

    @property
    def full_settings(self) -> dict[str, Any]:
        times = [list(local_rate.SCALE_TIMES), list(local_rate.NOISY_SCALE_TIMES)]
        rule = {"scale_times": times, "shake": local_rate.SHAKE, "noise_hides_from": step_size.FIRST_CAP}
        rule |= {"prior": [local_rate.PRIOR_RATE, local_rate.PRIOR_WEIGHT, local_rate.LARGE_NOISE]}
        rule |= {"subtracted": step_size.NOISE_SUBTRACTED, "rounds": FIT_ROUNDS, "local": str(FIT_LOCAL)}
        rule |= {"few_rows": local_rate.FEW_ROWS}
        return {**super().full_settings, **rule}


def fits(problem: Problem, epsilon: float, seeds: int) -> list[SuiteRun]:
    return [FitRun(problem.name, "fit", epsilon, seed) for seed in range(seeds)]


def rivals(problem: Problem, epsilon: float, seeds: int) -> list[list[SuiteRun]]:
    """The runs of each setting, one per seed."""
    return [
        [SuiteRun(problem.name, name, epsilon, seed, lr, rate) for seed in range(seeds)]
        for lr in problem.rates[2:7]
        for name, rate in RIVALS
    ]


@dataclass(frozen=True)
class Pair:
    """`fit` and all tuned rivals on a problem at an ε.

    Attributes:
        reached: by `fit`, seed by seed.
        grid: what each rival reached on average, over the seeds that all of them have.
        best: the setting of the best of them, in words.
        seeds: how many seeds the rivals were run with; only these count for the comparison.
        rivals: how many settings there are, of which `grid` may lack some.
    """

    problem: Problem
    epsilon: float
    reached: tuple[float, ...]
    grid: tuple[float, ...]
    best: str
    seeds: int
    rivals: int

    @property
    def best_value(self) -> float:
        return max(self.grid) if self.problem.higher_is_better else min(self.grid)

    @property
    def mean(self) -> float:
        return fmean(self.reached[: self.seeds])

    @property
    def lost(self) -> float:
        """Points of accuracy, where 2% of the best loss count as a point. Negative where `fit` is better."""
        if self.problem.higher_is_better:
            return self.best_value - self.mean
        return (self.mean / self.best_value - 1.0) / table.SHARE * table.POINTS

    @property
    def collapses(self) -> int:
        return table.Gap(self.problem, self.epsilon, self.best_value, self.reached, self.seeds).collapses

    def show(self) -> list[str]:
        lost = f"{self.lost:+.2f}" if self.problem.higher_is_better else f"{2 * self.lost:+.1f}%"
        few = "" if len(self.grid) == self.rivals else f", best of {len(self.grid)}"
        rival = f"{number(self.best_value, self.problem)} [{self.best}]{few}"
        marked = f"{lost} {table.MARK}" if not self.lost <= table.POINTS else lost
        reached = ", ".join(number(one, self.problem) for one in self.reached)
        return [self.problem.name, f"{self.epsilon:g}", reached, rival, marked]


def pair(problem: Problem, epsilon: float, seeds: int, lookup: Lookup) -> Pair | None:
    """None where `fit` or most rivals are not recorded. Rivals count with the seeds that all of them have."""
    reached = table.values(fits(problem, epsilon, seeds), lookup)
    settings = [(runs[0], table.values(runs, lookup)) for runs in rivals(problem, epsilon, seeds)]
    grid = [(run, found) for run, found in settings if found]
    if not reached or 2 * len(grid) <= len(settings):
        return None
    common = min([len(reached), *(len(found) for _, found in grid)])
    means = [fmean(found[:common]) for _, found in grid]
    sign = 1.0 if problem.higher_is_better else -1.0
    best = grid[max(range(len(means)), key=lambda at: sign * means[at])][0]
    words = f"{CONTENDERS[best.contender_name].label.removesuffix(', tuned')}, {best.lr:g}, {best.server_rate or 1:g}"
    return Pair(problem, epsilon, reached, tuple(means), words, common, len(settings))


def section(half: str, pairs: Sequence[Pair], command: str) -> Section:
    """The table, with the largest losses first, and what it says."""
    ordered = sorted(pairs, key=lambda one: -one.lost)
    rows = [one.show() for one in ordered]
    near = [one for one in pairs if one.lost <= table.POINTS]
    far = [one for one in pairs if not one.lost <= MOST_LOST]
    runs, collapses = sum(len(one.reached) for one in pairs), sum(one.collapses for one in pairs)
    claims = [
        Claim(
            "fit is within 1 point (2% of the loss) of the best tuned rival in 90% of the pairs",
            f"{len(near)} of {len(pairs)}",
            len(near) >= 0.9 * len(pairs),
        ),
        Claim(
            "fit is nowhere more than 3 points (6% of the loss) behind it",
            f"{len(far)} of {len(pairs)} pairs are",
            not far,
        ),
        Claim("No run of fit collapses", f"{collapses} of {runs} runs", collapses == 0),
    ]
    columns = ["problem", "ε", "fit, seed by seed", "best tuned rival [algorithm, local rate, server rate]", "lost"]
    return Section(
        f"tuned-{half}",
        f"fit against tuned rivals, the {half} half",
        [
            "A row is a problem at an ε. The rival is the best of 20 settings, chosen on the test data: DP-FedAvg at the server "
            "rates 1, 2 and 4 and safe DP-FedEXP, each at five local rates. What `fit` loses is measured on the seeds that the "
            f"rivals have: {_seeds(pairs)}. A row says where fewer settings were run. A loss of more than 1 point of accuracy or "
            f"2% of the loss has a {table.MARK}. A run "
            "collapses if it ends with half of the best accuracy or less, or with twice the best loss or more. The problems of a "
            "half are in `reproduction/suite/split.toml`; one without its data is left out."
        ],
        [Table("All pairs, the bad ones first", columns, rows)],
        [],
        claims if pairs else [],
        [],
        command,
    )


def _seeds(pairs: Sequence[Pair]) -> str:
    counts = sorted({one.seeds for one in pairs})
    return "1 seed" if counts == [1] else f"{' or '.join(map(str, counts))} seeds"


def draw(half: str, pairs: Sequence[Pair], path: Path) -> None:
    """A row to a problem, a panel to an ε: a gray dot for each tuned rival, a colored diamond for `fit`.

    The horizontal axis is what a setting reached in percent of the best rival: its accuracy over the best one, or the best loss
    over its own. The problem on which `fit` loses most is at the top.
    """
    from matplotlib.figure import Figure

    epsilons = [epsilon for epsilon in SHOWN if any(one.epsilon == epsilon for one in pairs)]
    order = sorted((one for one in pairs if one.epsilon == min(epsilons)), key=_percent_of_fit)
    names = list(dict.fromkeys(one.problem.name for one in [*order, *pairs]))
    made = Figure(figsize=(4.0 * len(epsilons) + 1.2, 0.27 * len(names) + 1.3), layout="constrained")
    axes = made.subplots(1, max(1, len(epsilons)), squeeze=False, sharey=True)[0]
    for axis, epsilon in zip(axes, epsilons, strict=False):
        for one in pairs:
            if one.epsilon != epsilon:
                continue
            row = names.index(one.problem.name)
            shares = [_percent(one, value) for value in one.grid]
            axis.plot(shares, [row] * len(shares), "o", color="0.45", alpha=0.45, markersize=5, markeredgewidth=0)
            axis.plot(_percent_of_fit(one), row, "D", color=CYCLE[NAMED["fit"]], markersize=7, clip_on=False, zorder=3)
        axis.axvline(100.0, color="0.3", linewidth=0.9, zorder=0)
        axis.set(title=f"ε = {epsilon:g}", xlim=(LEAST_SHOWN - 1.0, 104.0), yticks=range(len(names)), yticklabels=names)
        axis.set_xticks(
            range(int(LEAST_SHOWN), 101, 10), [f"≤ {LEAST_SHOWN:.0f}%", *(f"{x}%" for x in range(70, 101, 10))]
        )
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(length=0)
    axes[0].invert_yaxis()
    made.supxlabel("result, in percent of the best tuned rival (right is better)", fontsize=9)
    made.suptitle(f"fit without tuning (diamonds) and 20 tuned settings (dots), the {half} half", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_figure(made, path)


def _percent_of_fit(one: Pair) -> float:
    return _percent(one, one.mean)


def _percent(one: Pair, value: float) -> float:
    """Of the best rival, inside the figure's axis."""
    share = value / one.best_value if one.problem.higher_is_better else one.best_value / value
    return min(104.0, max(LEAST_SHOWN, 100.0 * share)) if math.isfinite(share) else LEAST_SHOWN


def compare(
    half: str, names: Sequence[str], seeds: int, place: Place, out: Path, *, recorded: bool, say: Callable[[str], None]
) -> Section:
    """Makes the runs that are missing unless `recorded`, and writes the table and the figure of a half to the folder `out`.

    Args:
        half: "tuning" or "held-out".
        names: only these of its problems; none for all.
        seeds: of every setting. The rivals' second seed is run last.
        place: where runs are made.
        out: the folder of results.
        recorded: build from what is recorded; run nothing.
        say: hears a sentence about whatever is left out.
    """
    of_half = [name for name in PROBLEMS if HALVES[name] == half and (not names or name in check_names(names))]
    lines, outcome = Lines(out), Outcome()
    chosen = [PROBLEMS[name] for name in of_half if recorded or is_there(name, place, say, asked=name in names)]
    if not recorded:

        def stages(lines: Lines) -> list[SuiteRun]:
            own = [run for e in EPSILONS for problem in chosen for run in fits(problem, e, seeds)]
            grid = [runs[s] for s in range(seeds) for e in EPSILONS for one in chosen for runs in rivals(one, e, seeds)]
            return [*own, *grid]

        lines, outcome = run_stages(chosen, out, place, [stages])
        if outcome.stopped:
            say("Stopped at the limit of time; the same command goes on from here.")
    for failure in outcome.failed:
        say(f"Failed, and not recorded: {failure}")
    found = [pair(problem, e, seeds, lines.result) for problem in chosen for e in sorted(EPSILONS)]
    pairs = [one for one in found if one is not None]
    made = section(half, pairs, f"python -m reproduction tuned {half}")
    replace_text(out / f"tuned-{half}.md", suite_page.markdown(made, [f"tuned-{half}.svg"]))
    if pairs:
        draw(half, pairs, out / f"tuned-{half}.svg")
    return made
