"""Private selection: a secret number of runs with settings drawn from the grid; only the best is shown.

OUT/selection.json   facts of the selection: hash of the settings, mean number of runs, and ε
OUT/best             the best run, with the statement of the selection
OUT/selection.txt    the result and its cost

The draw and the runs are in `selections/` of the private folder (`engine.private_folder.root`) and are removed at the end.
A killed selection resumes with the same draw; without its private folder it is refused.
"""

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dpfedexp.accounting import compose, gdp
from dpfedexp.accounting.pld import number_of_runs, selection_epsilon
from dpfedexp.algorithms.round import Full
from dpfedexp.cli import trials
from dpfedexp.cli.trials import Sweep, Trial
from dpfedexp.engine.outlets import CONFIG
from dpfedexp.engine.plot import main_metric
from dpfedexp.engine.private_folder import VARIABLE, is_run_id, root
from dpfedexp.engine.run import Run
from dpfedexp.errors import InputError, require
from dpfedexp.files import replace_text, set_dates, try_lock
from dpfedexp.machine import cores
from dpfedexp.report.page import read_run

BEGUN, BEST, TEXT, DRAW = "selection.json", "best", "selection.txt", "draw.json"


def select(
    plan: Sweep, grid: Sequence[Trial], repeats: float, metric: str | None, delta: float, command: str = ""
) -> str:
    """Write the run with the best score to `OUT/best` and the result with its cost to `OUT/selection.txt`; return that text.

    Formal guarantee: everything in OUT is (ε, δ)-differentially private with the ε of `selection_epsilon`, if the scores follow
    from the releases of the runs and public data alone, and if the private folder and the duration of the selection stay secret. A
    run that fails has the worst score. A run that was charged more than planned, as after a crash, counts with its actual charges.

    `repeats` is the mean number of runs, `metric` one of the server's test set (None: the usual one), `command` for the report.
    """
    mu, settings = _planned(plan, grid, delta)
    facts = {
        "repeats": repeats,
        "metric": metric or "",
        "delta": delta,
        "epsilon": selection_epsilon(mu, delta, repeats),
        "settings": hashlib.sha256(json.dumps(settings).encode()).hexdigest(),
    }
    hidden = replace(plan, out=_begin(plan.out, facts, grid, repeats))
    with _one_process(hidden.out / DRAW):
        drawn = [Trial(tuple(changes), seed) for changes, seed in json.loads((hidden.out / DRAW).read_text("utf-8"))]
        unfinished = [trial for trial in drawn if not hidden.is_finished(trial)]
        # The number of processes and threads must not depend on the draw, so that it does not reveal the number of runs.
        failed = trials.make_runs(hidden, unfinished, plan.jobs or cores())
        done = [trial for trial in drawn if trial not in failed]
        if not done:
            raise InputError(f"the selection has no run that came to its end: {failed[drawn[0]]}")
        charged = [
            compose(ledger.charges(), delta) for ledger in trials.ledgers_below(hidden.out).values() if len(ledger)
        ]
        require(
            all(cost.mu is not None for cost in charged),
            "private selection needs rounds of Gaussian noise in which all clients take part; these are others.",
        )
        text = _publish(plan, hidden, done, max([mu, *(cost.mu or 0.0 for cost in charged)]), repeats, metric, command)
    shutil.rmtree(hidden.out)
    return text


def _publish(
    plan: Sweep, hidden: Sweep, done: Sequence[Trial], mu: float, repeats: float, metric: str | None, command: str
) -> str:
    """Copy the best run out of the private folder, with the statement of the selection; return the text of the result."""
    records = [read_run(hidden.folder(trial)) for trial in done]
    name = main_metric([one.history for one in records], metric, "--select")
    sign = 1.0 if trials.higher_is_better(name) else -1.0
    best = done[max(range(len(done)), key=lambda number: sign * trials.last(records[number], name))]
    run = Run.load(hidden.folder(best))
    alone = compose(run.ledger.charges(), run.privacy.delta)
    statement = run.privacy.of_selection(alone, repeats, mu)
    history = [{**record, "epsilon_total": statement.epsilon_total} for record in run.history]
    facts = None if run.facts is None else replace(run.facts, command=command)
    stage = plan.out / f"{BEST}.tmp"
    shutil.rmtree(stage, ignore_errors=True)
    shutil.rmtree(plan.out / BEST, ignore_errors=True)
    replace(run, privacy=statement, history=history, facts=facts).save(stage)
    shutil.copyfile(hidden.folder(best) / CONFIG, stage / CONFIG)
    os.replace(stage, plan.out / BEST)
    text = (
        f"The best by {name} of a secret number of runs, {repeats:g} on average, whose settings were drawn from the grid: "
        f"{best.label}. Everything that is shown costs each client ε = {statement.epsilon_total:.3f} at δ = {statement.delta:g} "
        f"under {statement.adjacency} adjacency, and {BEST}/ says the same. The other runs were removed; this holds if no one "
        "has seen them, their number or how long it took, and if the score comes from data that are not the clients'.\n"
    )
    replace_text(plan.out / TEXT, text)
    now = time.time()
    # The dates of files would reveal how long the selection took, and so the number of runs.
    for folder in (plan.out / BEST, plan.out):
        set_dates(folder, [path.name for path in folder.iterdir()], now)
    return text


def _planned(plan: Sweep, grid: Sequence[Trial], delta: float) -> tuple[float, list[Any]]:
    """Return μ of the most expensive setting of the grid, drawn or not, which bounds the cost of one run, and all settings."""
    targets, settings = [], trials.check_one_promise(plan, grid)
    for trial, one in zip(grid, settings, strict=True):
        algorithm = one.build_algorithm()
        if algorithm.target_epsilon is None or algorithm.target_per != "total" or algorithm.delta != delta:
            raise InputError(
                f"private selection needs algorithm.target_epsilon for the whole run and delta = {delta:g} in every setting of the "
                f"grid, so that its cost is known before any run; {trial.label} has another promise."
            )
        require(
            isinstance(one.build_participation(), Full),
            f"private selection needs rounds in which all clients take part; {trial.label} has participation.kind = "
            f"{one.participation.kind!r}.",
        )
        targets.append(algorithm.target_epsilon)
    return gdp.mu(max(targets), delta), [one.model_dump(mode="json") for one in settings]


def _begin(out: Path, facts: dict[str, Any], grid: Sequence[Trial], repeats: float) -> Path:
    """Return the private folder of the selection: that of a selection already begun in OUT, or a new one."""
    path = out / BEGUN
    if not path.is_file():
        if out.exists() and any(out.iterdir()):
            raise InputError(f"the folder {str(out)!r} is not empty; name a new one for the selection with --out.")
        name = secrets.token_hex(8)
        hidden = _hidden(name)
        require(
            not hidden.resolve().is_relative_to(out.resolve()),
            f"the private folder {str(root())!r} lies in {str(out)!r}, which is shown; set {VARIABLE} to one outside.",
        )
        try:
            hidden.mkdir(parents=True, mode=0o700)
            replace_text(hidden / DRAW, json.dumps(_drawn(grid, repeats)), mode=0o600)
            out.mkdir(parents=True, exist_ok=True)
            replace_text(path, json.dumps({"selection": name, **facts}, indent=1) + "\n")
        except OSError as error:
            raise InputError(f"{error.filename!r} can't be written: {error.strerror}.") from None
        return hidden
    try:
        begun = json.loads(path.read_text(encoding="utf-8"))
        name = begun.pop("selection")
        require(is_run_id(name), "")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            f"the file {str(path)!r} does not describe a selection; name a new folder with --out."
        ) from None
    if (out / TEXT).is_file():
        shutil.rmtree(_hidden(name), ignore_errors=True)
        raise InputError(f"the folder {str(out)!r} holds a selection already; name a new one with --out.")
    changed = [key for key, value in facts.items() if begun.get(key) != value]
    require(
        not changed,
        f"the selection in {str(out)!r} was started with other {' and '.join(changed)}; use the same command to resume, or name "
        "a new folder with --out.",
    )
    require(
        (_hidden(name) / DRAW).is_file(),
        f"the selection in {str(out)!r} was begun, and its private folder {str(_hidden(name))!r} is missing, so it can't go "
        f"on. Put it back or set {VARIABLE}; or name a new folder with --out, and count ε = {facts['epsilon']:.3f} for this "
        "one if anything of its runs was seen.",
    )
    return _hidden(name)


def _hidden(name: str) -> Path:
    return root() / "selections" / name


def _drawn(grid: Sequence[Trial], repeats: float) -> list[tuple[tuple[str, ...], int]]:
    """Draw the settings and a seed for each of a geometric number of runs; the result is secret."""
    draw = secrets.SystemRandom()
    return [(draw.choice(grid).changes, draw.randrange(2**31)) for _ in range(number_of_runs(repeats, draw.random()))]


@contextmanager
def _one_process(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR)
    try:
        try_lock(descriptor)
        yield
    except BlockingIOError:
        raise InputError("another process is running this selection; wait until it ends.") from None
    finally:
        os.close(descriptor)
