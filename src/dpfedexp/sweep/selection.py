"""Private selection: a secret number of runs with settings drawn from the grid, of which only the best is ever seen."""

from __future__ import annotations

import json
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpfedexp.accounting import compose, gdp
from dpfedexp.accounting.selection import number_of_runs, selection_epsilon
from dpfedexp.errors import InputError
from dpfedexp.files import replace_text
from dpfedexp.report.runs import read_run
from dpfedexp.runs.file_names import STATEMENT
from dpfedexp.sweep.grid import Trial
from dpfedexp.sweep.page import higher_is_better, last, metric_of
from dpfedexp.sweep.price import charges
from dpfedexp.sweep.run import Plan, run_trials

HIDDEN, BEST, TEXT = "secret", "best", "selection.txt"


def select(plan: Plan, grid: Sequence[Trial], repeats: float, metric: str | None, delta: float) -> str:
    """Leaves `OUT/best`, the run with the best score, and `OUT/selection.txt`, what it cost; returns that text.

    Formal guarantee: the best run's folder is (ε, δ)-differentially private with the ε of `selection_epsilon`, if its scores follow
    from the runs' releases and public data alone and the folder `secret`, which is removed, was not seen.

    Args:
        plan: where.
        grid: the settings to draw from.
        repeats: the mean number of runs.
        metric: of the server's own test set; None for the usual one.
        delta: δ.
    """
    if (plan.out / TEXT).is_file():
        raise InputError(f"the folder {str(plan.out)!r} holds a selection already; name a new one with --out.")
    hidden, mu = replace(plan, out=plan.out / HIDDEN), _dearest(plan, grid, delta)
    epsilon = selection_epsilon(mu, delta, repeats)
    trials = _drawn(hidden.out, grid, repeats)
    outcome = run_trials(hidden, trials)
    if outcome.failed:
        raise InputError(f"a run of the selection failed, and nothing is shown: {outcome.failed[0][1]}")
    costs = [compose(charges(hidden.folder(trial)), delta) for trial in trials]
    if any(cost.mu is None or cost.mu > mu * (1 + 1e-9) for cost in costs):
        raise InputError(
            "private selection needs rounds of Gaussian noise in which everybody takes part; these are others."
        )
    runs = [read_run(hidden.folder(trial)) for trial in trials]
    name = metric_of(runs, metric)
    sign = 1.0 if higher_is_better(name) else -1.0
    best = max(range(len(runs)), key=lambda number: sign * last(runs[number], name))
    shutil.copytree(hidden.folder(trials[best]), plan.out / BEST)
    text = (
        f"The best by {name} of a secret number of runs, {repeats:g} on average, whose settings were drawn from the grid: "
        f"{trials[best].label}. Everything that is shown costs each client ε = {epsilon:.3f} at δ = {delta:g}, "
        f"whatever {BEST}/{STATEMENT} says of that run alone ({costs[best].epsilon:.3f}). The other runs were removed; nobody may "
        "have seen them, or how many there were, and the score must come from data that are not the clients'.\n"
    )
    replace_text(plan.out / TEXT, text)
    shutil.rmtree(hidden.out)
    return text


def _dearest(plan: Plan, grid: Sequence[Trial], delta: float) -> float:
    """μ of the dearest setting of the grid, drawn or not: what one run with settings drawn from it costs."""
    targets = []
    for trial in grid:
        algorithm = trial.settings(plan.file, plan.overrides).build_algorithm()
        if algorithm.target_epsilon is None or algorithm.target_per != "total" or algorithm.delta != delta:
            raise InputError(
                f"private selection needs algorithm.target_epsilon for the whole run and delta = {delta:g} in every setting of the "
                f"grid, so that its cost is known before any run; {trial.label} has another promise."
            )
        targets.append(algorithm.target_epsilon)
    return gdp.mu(max(targets), delta)


def _drawn(folder: Path, grid: Sequence[Trial], repeats: float) -> list[Trial]:
    """The secret draw, kept while runs are going on so that an interrupted selection is the same one later."""
    path = folder / "draw.json"
    if not path.is_file():
        draw = secrets.SystemRandom()
        chosen = [
            (draw.choice(grid).changes, draw.randrange(2**31)) for _ in range(number_of_runs(repeats, draw.random()))
        ]
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_text(path, json.dumps(chosen))
    return [Trial(tuple(changes), seed) for changes, seed in json.loads(path.read_text(encoding="utf-8"))]
