"""The trials of a sweep: a grid becomes runs of `dpfedexp train`, each in its own folder; their results and their total cost."""

import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

from dpfedexp.accounting import Event, Ledger, NonPrivateEvent, compose
from dpfedexp.config import Settings, load
from dpfedexp.engine.outlets import CHECKPOINT, ERROR, LEDGER, LEDGER_HEAD, METRICS, MODEL, STATEMENT, recorded
from dpfedexp.engine.plot import Chart, Panel, Series, main_metric, name_of
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.files import replace_text, writing
from dpfedexp.machine import JobProgress, cores
from dpfedexp.report.document import Section, Table
from dpfedexp.report.page import RunRecord, read_run

LONGEST = 120
"""The largest length of the readable part of a folder name."""
TRACES = (LEDGER_HEAD, CHECKPOINT, METRICS, MODEL, STATEMENT)
"""Files that show that a run released something: at least one of them exists then."""
HIGHER = ("accuracy", "auc", "r2", "match", "improved")
"""Parts of the names of metrics for which higher is better."""
MOST_CURVES = 8
Charges = list[tuple[Event, int]]


@dataclass(frozen=True)
class Trial:
    """One run of a sweep: its changes to the settings file, each as `section.key=value`, and the seed."""

    changes: tuple[str, ...]
    seed: int

    @property
    def label(self) -> str:
        """The changed settings without the seed, by the last parts of their names; "as in the file" without changes."""
        pairs = [change.partition("=") for change in self.changes]
        return ", ".join(f"{key.rpartition('.')[2]}={value}" for key, _, value in pairs) or "as in the file"

    def folder(self, settings: str) -> str:
        """Return a folder name that is unique to the trial and its settings: a readable part and a hash."""
        text = "_".join([*self.changes, f"seed={self.seed}"])
        readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_=.") else "-" for c in text)
        digest = hashlib.sha256(json.dumps([self.changes, self.seed, settings]).encode()).hexdigest()
        return f"{readable[:LONGEST]}_{digest[:16]}"


@dataclass(frozen=True)
class Sweep:
    """A sweep: settings file, output folder, overrides `section.key=value` for all runs, data folder, and parallel runs."""

    file: Path
    out: Path
    overrides: tuple[str, ...] = ()
    data: str | None = None
    jobs: int | None = None

    def texts(self, trial: Trial) -> list[str]:
        return [*self.overrides, *trial.changes, f"run.seed={trial.seed}"]

    def settings(self, trial: Trial) -> Settings:
        return load(self.file, self.texts(trial))

    def folder(self, trial: Trial) -> Path:
        """Return the folder of a run. Its name depends on all settings, so that runs with other settings are never mixed up."""
        return self.out / trial.folder(self.settings(trial).model_dump_json())

    def is_finished(self, trial: Trial) -> bool:
        from dpfedexp.flower.monitor import read_status

        try:
            return read_status(self.folder(trial))["status"] in ("completed", "stopped")
        except InputError:
            return False


def trials(grid: Sequence[str], seeds: int) -> list[Trial]:
    """Return all combinations of a grid, such as `algorithm.clip=0.1,0.3,1`, with each seed."""
    axes = [_axis(text) for text in grid]
    keys = [axis[0].partition("=")[0] for axis in axes]
    twice = {key for key in keys if keys.count(key) > 1}
    require(
        not twice, f"--grid has {', '.join(sorted(twice))} twice; give all of its values in one, separated by commas."
    )
    require("run.seed" not in keys, "--grid has run.seed; --seeds says how many seeds there are.")
    return [Trial(changes, seed) for changes in product(*axes) for seed in range(seeds)]


def _axis(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    found = list(dict.fromkeys(part.strip() for part in _split(values)))
    if not equals or not key.strip() or "" in found:
        raise InputError(f"--grid is {text!r}; it must look like algorithm.clip=0.1,0.3,1.")
    return [f"{key.strip()}={value}" for value in found]


def _split(text: str) -> list[str]:
    """Split a text at the commas outside of brackets and quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote or c in "\"'":
            quote = "" if c == quote else quote or c
        depth += (c in "[{(") - (c in "]})") if not quote else 0
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def check_one_promise(plan: Sweep, grid: Sequence[Trial]) -> list[Settings]:
    """Check and return the settings of all trials; raise `InputError` if no single ε can cover their guarantees."""
    settings = [plan.settings(trial) for trial in grid]
    for one in settings:
        one.check()
    private = [one for one in settings if one.build_algorithm().private]
    promises = {
        "algorithm.adjacency": {repr(one.build_algorithm().adjacency) for one in private},
        "participation.noise_cohort": {repr(one.participation.noise_cohort) for one in private},
    }
    for name, values in promises.items():
        require(
            len(values) < 2,
            f"--grid has {name} {' and '.join(sorted(values))}; their ε are for different neighboring data sets or different "
            "deployments, so that no single ε covers all runs; make a sweep for each value.",
        )
    return settings


def run_trials(plan: Sweep, trials: Sequence[Trial]) -> dict[Trial, str]:
    """Make all runs that are not finished, after checking all settings; return the failed runs with their reasons."""
    secure = any(one.run.secure for one in check_one_promise(plan, trials))
    with writing(plan.out):
        plan.out.mkdir(parents=True, exist_ok=True)
    missing = [trial for trial in trials if not plan.is_finished(trial)]
    times = bool(recorded("terminal", {"elapsed": None}, secure=secure))
    jobs = min(plan.jobs or cores(), len(trials))
    failures: dict[Trial, str] = {}
    with JobProgress("sweep", [1.0] * len(missing), times=times) as progress, ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_train, plan, trial, max(1, cores() // jobs)): trial for trial in missing}
        try:
            for future in as_completed(futures):
                if problem := future.result():
                    failures[futures[future]] = problem
                progress.advance(1.0)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    return failures


def _train(plan: Sweep, trial: Trial, threads: int) -> str:
    """Run one trial; return "" or the last line of its error."""
    folder = plan.folder(trial)
    command = [sys.executable, "-m", "dpfedexp", "train", str(plan.file), "--out", str(folder), "--quiet"]
    command += [part for text in plan.texts(trial) for part in ("--set", text)]
    command += [] if plan.data is None else ["--data", plan.data]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "1000"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # A run that stopped early has its results too.
    if plan.is_finished(trial):
        return ""
    secure = bool(plan.settings(trial).run.secure)
    if folder.is_dir() and (kept := recorded(ERROR, {"text": done.stderr}, secure=secure)):
        replace_text(folder / ERROR, kept["text"])
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")


@dataclass(frozen=True)
class Price:
    """The ε of a sweep for the clients, if all of its runs used the same clients.

    It is stated for the most expensive run alone (`one`), for all `runs` that were charged (`together`), and for the most
    expensive run of each combination of `settings`. `noise_cohort` is that of a larger deployment; None for the runs' own clients.
    """

    runs: int
    delta: float
    one: float
    together: float
    settings: float
    adjacency: str
    noise_cohort: int | None

    @property
    def sentences(self) -> list[str]:
        larger = (
            f"The promise is that of a larger deployment with {self.noise_cohort} clients in a round, and none to the clients "
            "whose data these runs used."
        )
        return [
            f"One run costs ε = {self.one:.3f} at δ = {self.delta:g} under {self.adjacency} adjacency. On the same clients the "
            f"{self.runs} runs cost ε = {self.together:.3f} together, those that failed or were stopped included, and one run "
            f"of every setting ε = {self.settings:.3f}. Publishing only the best run costs as much as publishing all of them.",
            *([] if self.noise_cohort is None else [larger]),
        ]


def price_below(folder: Path, labels: Mapping[Path, str], delta: float) -> Price:
    """Compute the cost of all runs below a folder, failed runs included, composed from all of their ledgers.

    `labels` maps the folders of the runs of this grid to their settings; any other run is labeled by its path.
    """
    found = {path.parent for name in (LEDGER, *TRACES) for path in folder.rglob(name)}
    try:
        ledgers = {run: Ledger.open(run / LEDGER, read_only=True) for run in sorted(found)}
    except LedgerError as error:
        raise InputError(
            f"what the sweep spent is not known: {error} Restore that ledger, or name a new folder."
        ) from None
    charged = {run: ledger for run, ledger in ledgers.items() if len(ledger)}
    cohorts = {ledger.header.get("noise_cohort") for ledger in charged.values()} or {None}
    require(
        len(cohorts) < 2,
        "the runs below the folder have different noise cohorts, so their guarantees are for different clients and no single ε "
        "covers all of them; make a sweep of each in a folder of its own.",
    )
    runs = [(labels.get(run, str(run.relative_to(folder))), ledger.charges()) for run, ledger in charged.items()]
    return price(runs, delta, cohorts.pop())


def price(runs: Sequence[tuple[str, Charges]], delta: float, noise_cohort: int | None = None) -> Price:
    """Compute the cost of runs, each given by the label of its settings and its charges."""
    require(len(runs) > 0, "no run of the sweep has a charge on its ledger; start the sweep again in a new folder.")
    private = not any(isinstance(event, NonPrivateEvent) for _, one in runs for event, _ in one)
    require(private, "some runs of the sweep promise no privacy, so that together they promise none.")
    together = compose([charge for _, one in runs for charge in one], delta)
    ordered = sorted((compose(one, delta).epsilon, number) for number, (_, one) in enumerate(runs))
    # The last run of a label is its most expensive one.
    dearest = dict(runs[number] for _, number in ordered)
    settings = compose([charge for one in dearest.values() for charge in one], delta).epsilon
    return Price(len(runs), delta, ordered[-1][0], together.epsilon, settings, together.adjacency, noise_cohort)


def higher_is_better(metric: str) -> bool:
    return any(part in metric for part in HIGHER)


def last(run: RunRecord, metric: str) -> float:
    """Return the last value of a metric; the worst possible value if it is missing or not finite."""
    value = ([record[metric] for record in run.history if metric in record] or [None])[-1]
    worst = -math.inf if higher_is_better(metric) else math.inf
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else worst


def section(
    plan: Sweep, made: Sequence[Trial], failed: Mapping[Trial, str], select: str | None, delta: float, command: str
) -> Section:
    """Return the report section of a sweep: settings ranked by `select`, with mean and deviation over seeds, curves, and cost."""
    try:
        paid = price_below(plan.out, {plan.folder(trial): trial.label for trial in made}, delta).sentences
    except InputError as error:
        paid = [str(error)[:1].upper() + str(error)[1:]]
    if len(failed) == len(made):
        raise InputError(f"every run of the sweep failed, the first with: {next(iter(failed.values()))} {paid[0]}")
    groups: dict[str, list[RunRecord]] = {}
    for trial in (trial for trial in made if trial not in failed):
        groups.setdefault(trial.label, []).append(read_run(plan.folder(trial)))
    runs = [run for group in groups.values() for run in group]
    try:
        metric = main_metric([run.history for run in runs], select, "--select")
    except InputError as error:
        raise InputError(f"{error} {paid[0]}") from None
    metrics = [metric, *(name for name in runs[0].metrics if name != metric)]
    sign = -1.0 if higher_is_better(metric) else 1.0
    ranked = sorted(groups, key=lambda label: sign * fmean(last(run, metric) for run in groups[label]))
    rows = []
    for label in ranked:
        spent = max((run.epsilon_total for run in groups[label] if run.epsilon_total is not None), default=None)
        found = (_spread([last(run, name) for run in groups[label]]) for name in metrics)
        rows.append([label, *found, "–" if spent is None else f"{spent:.3f}"])
    columns = ["setting", *map(name_of, metrics), "ε of one run"]
    curves = [
        band(label, [{one["round"]: one.get(metric) for one in run.history} for run in groups[label]])
        for label in ranked[:MOST_CURVES]
    ]
    few = "" if len(ranked) <= MOST_CURVES else f" The best {MOST_CURVES} of {len(ranked)} settings."
    caption = f"Mean over seeds, with a band of one standard deviation.{few}"
    seeds = max(len(group) for group in groups.values())
    return Section(
        name="sweep",
        title=f"{len(groups)} settings, {len(runs)} runs",
        text=[
            # A sweep may compare several algorithms.
            *filter(None, dict.fromkeys(run.title(promise=False) for run in runs)),
            *paid,
            f"Best first by {name_of(metric)} after the last round; mean ± standard deviation, {seeds} seeds.",
        ],
        tables=[Table("What was found", columns, rows)],
        charts=[Chart("sweep", "Over rounds", caption, [Panel(name_of(metric), "round", name_of(metric), curves)])],
        notes=[f"Failed: {trial.label}, seed {trial.seed}: {why}" for trial, why in failed.items()],
        command=command,
    )


def _spread(values: list[float]) -> str:
    known = [value for value in values if math.isfinite(value)]
    if len(known) < len(values):
        return f"{len(values) - len(known)} of {len(values)} diverged"
    return f"{fmean(known):.4g}" + (f" ± {stdev(known):.2g}" if len(known) > 1 else "")


def band(label: str, runs: Sequence[Mapping[int, object]]) -> Series:
    """Return the mean of the runs by round, with a band of one standard deviation if there are several runs."""
    by_round: dict[int, list[float]] = {}
    for at, value in (item for run in runs for item in run.items()):
        if isinstance(value, int | float) and math.isfinite(value):
            by_round.setdefault(at, []).append(float(value))
    rounds = sorted(by_round)
    means = [fmean(by_round[t]) for t in rounds]
    if len(runs) == 1:
        return Series(label, rounds, means)
    spreads = [stdev(by_round[t]) if len(by_round[t]) > 1 else 0.0 for t in rounds]
    low, high = ([mean + s * spread for mean, spread in zip(means, spreads, strict=True)] for s in (-1, 1))
    return Series(label, rounds, means, low, high)
