"""What a sweep found: a table of settings with mean and standard deviation over seeds, curves, and the price."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, stdev

from dpfedexp.cli.sweeps.grid import Trial
from dpfedexp.cli.sweeps.price import price_below
from dpfedexp.cli.sweeps.run import Outcome, Plan
from dpfedexp.engine.plot import Chart, Panel, Series, name_of
from dpfedexp.errors import InputError, nearest
from dpfedexp.report.document import Section, Table
from dpfedexp.report.runs import RunRecord, read_run

HIGHER = ("accuracy", "auc", "r2", "match", "helped")
"""Parts of the names of metrics of which more is better."""
MOST_CURVES = 8


def higher_is_better(metric: str) -> bool:
    return any(part in metric for part in HIGHER)


def last(run: RunRecord, metric: str) -> float:
    """The metric of the last round that has it; the worst possible where it is no number."""
    values = [record[metric] for record in run.history if metric in record]
    worst = -math.inf if higher_is_better(metric) else math.inf
    return float(values[-1]) if values and isinstance(values[-1], int | float) and math.isfinite(values[-1]) else worst


def metric_of(runs: Sequence[RunRecord], asked: str | None) -> str:
    """The metric that settings are ranked by: what is asked for, or accuracy, or the first that there is."""
    names = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if not names:
        raise InputError("the runs of the sweep measured nothing to rank them by; give them a test set.")
    if asked is not None and asked not in names:
        raise InputError(f"--select is {asked!r}, which the runs did not measure.{nearest(asked, names)}")
    return asked or ("test_accuracy" if "test_accuracy" in names else names[0])


def section(plan: Plan, outcome: Outcome, select: str | None, delta: float, command: str) -> Section:
    """Of the finished trials.

    Args:
        plan: where they are.
        outcome: which ended, and which failed.
        select: the metric that ranks them; None for the usual one.
        delta: δ of the price.
        command: what makes the page again.
    """
    paid = _paid(plan, [*outcome.done, *(trial for trial, _ in outcome.failed)], delta)
    if not outcome.done:
        raise InputError(f"every run of the sweep failed, the first with: {outcome.failed[0][1]} {paid[0]}")
    runs = {trial: read_run(plan.folder(trial)) for trial in outcome.done}
    try:
        metric = metric_of(list(runs.values()), select)
    except InputError as error:
        raise InputError(f"{error} {paid[0]}") from None
    others = [name for name in next(iter(runs.values())).metrics if name != metric]
    groups: dict[str, list[tuple[Trial, RunRecord]]] = {}
    for trial, run in runs.items():
        groups.setdefault(trial.label, []).append((trial, run))
    sign = -1.0 if higher_is_better(metric) else 1.0
    ranked = sorted(groups, key=lambda label: sign * fmean(last(run, metric) for _, run in groups[label]))
    rows = [
        [
            label,
            *(_spread([last(run, name) for _, run in groups[label]]) for name in (metric, *others)),
            _epsilon(groups[label]),
        ]
        for label in ranked
    ]
    columns = ["setting", *(name_of(name) for name in (metric, *others)), "ε of one run"]
    panel = Panel(name_of(metric), "round", name_of(metric), _curves(ranked[:MOST_CURVES], groups, metric))
    seeds = max(len(group) for group in groups.values())
    return Section(
        name="sweep",
        title=f"{len(groups)} settings, {len(runs)} runs",
        text=[
            replace(next(iter(runs.values())).header, epsilon="").text,
            *paid,
            f"Best first by {name_of(metric)} after the last round; mean ± standard deviation, {seeds} seeds.",
        ],
        tables=[Table("What was found", columns, rows)],
        charts=[Chart("sweep", "Over rounds", _caption(len(ranked)), [panel])],
        notes=[f"Failed: {trial.label}, seed {trial.seed}: {why}" for trial, why in outcome.failed],
        command=command,
    )


def _paid(plan: Plan, trials: Sequence[Trial], delta: float) -> list[str]:
    """What everything below the folder cost, in sentences, or why there is no figure."""
    try:
        return price_below(plan.out, {plan.folder(trial): trial.label for trial in trials}, delta).sentences
    except InputError as error:
        return [str(error)[:1].upper() + str(error)[1:]]


def _caption(settings: int) -> str:
    text = "Mean over seeds, with a band of one standard deviation."
    return text if settings <= MOST_CURVES else f"{text} The best {MOST_CURVES} of {settings} settings."


def _spread(values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} diverged"
    return f"{fmean(known):.4g}" + (f" ± {stdev(known):.2g}" if len(known) > 1 else "")


def _epsilon(group: list[tuple[Trial, RunRecord]]) -> str:
    known = [run.epsilon_total for _, run in group if run.epsilon_total is not None]
    return f"{max(known):.3f}" if known else "–"


def _curves(labels: Sequence[str], groups: dict[str, list[tuple[Trial, RunRecord]]], metric: str) -> list[Series]:
    curves = []
    for label in labels:
        by_round: dict[int, list[float]] = {}
        for _, run in groups[label]:
            for record in run.history:
                value = record.get(metric)
                if isinstance(value, int | float) and math.isfinite(value):
                    by_round.setdefault(record["round"], []).append(float(value))
        rounds = sorted(by_round)
        means = [fmean(by_round[t]) for t in rounds]
        spreads = [stdev(by_round[t]) if len(by_round[t]) > 1 else 0.0 for t in rounds]
        band = len(groups[label]) > 1
        low = [mean - s for mean, s in zip(means, spreads, strict=True)] if band else None
        high = [mean + s for mean, s in zip(means, spreads, strict=True)] if band else None
        curves.append(Series(label, rounds, means, low, high))
    return curves
