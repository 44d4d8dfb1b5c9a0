"""The runs of a sweep, side by side: each is a `dpfedexp train` in a folder of its own, and goes on where it stopped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from dpfedexp.cli.sweeps.grid import Trial, check_one_promise
from dpfedexp.engine.outlets import ERROR, STATEMENT, recorded
from dpfedexp.errors import InputError
from dpfedexp.files import replace_text
from dpfedexp.machine import JobProgress, cores


@dataclass(frozen=True)
class Plan:
    """What is run, and where.

    Attributes:
        file: the TOML file.
        overrides: `section.key=value` for all runs.
        data: the folder with the data set's files.
        out: the folder of the sweep.
        jobs: runs side by side; None for one to a core.
    """

    file: Path
    out: Path
    overrides: tuple[str, ...] = ()
    data: str | None = None
    jobs: int | None = None

    def folder(self, trial: Trial) -> Path:
        return self.out / trial.folder


@dataclass
class Outcome:
    """The trials that ended, and those that failed, with why."""

    done: list[Trial] = field(default_factory=list)
    failed: list[tuple[Trial, str]] = field(default_factory=list)


def run_trials(plan: Plan, trials: Sequence[Trial]) -> Outcome:
    """Makes the runs that are not finished. All settings are checked before the first begins."""
    settings = check_one_promise(trials, plan.file, plan.overrides)
    secure = any(one.run.secure for one in settings)
    try:
        plan.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(plan.out)!r} can't be written: {error.strerror}.") from None
    missing = [trial for trial in trials if not is_finished(plan.folder(trial))]
    times = bool(recorded("terminal", {"elapsed": None}, secure=secure))
    with JobProgress("sweep", [1.0] * len(missing), times=times) as progress:
        failures = make_runs(plan, missing, min(plan.jobs or cores(), max(len(trials), 1)), progress.advance)
    return Outcome([trial for trial in trials if trial not in failures], list(failures.items()))


def is_finished(folder: Path) -> bool:
    """Whether the run in a folder came to its end."""
    return (folder / STATEMENT).is_file()


def make_runs(
    plan: Plan, trials: Sequence[Trial], jobs: int, advance: Callable[[float], None] = lambda cost: None
) -> dict[Trial, str]:
    """Makes runs, so many side by side, and tells `advance` of each that ended; returns those that failed, with why."""
    failures: dict[Trial, str] = {}
    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(_train, plan, trial, max(1, cores() // jobs)): trial for trial in trials}
        try:
            for future in as_completed(futures):
                if problem := future.result():
                    failures[futures[future]] = problem
                advance(1.0)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def _train(plan: Plan, trial: Trial, threads: int) -> str:
    """Nothing, or the last line of what went wrong."""
    folder = plan.folder(trial)
    overrides = [
        part for text in (*plan.overrides, *trial.changes, f"run.seed={trial.seed}") for part in ("--set", text)
    ]
    data = [] if plan.data is None else ["--data", plan.data]
    command = [sys.executable, "-m", "dpfedexp", "train", str(plan.file), "--out", str(folder), "--resume", "--quiet"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "COLUMNS": "1000"}
    done = subprocess.run([*command, *overrides, *data], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    secure = bool(trial.settings(plan.file, plan.overrides).run.secure)
    if folder.is_dir() and (kept := recorded(ERROR, {"text": done.stderr}, secure=secure)):
        replace_text(folder / ERROR, kept["text"])
    return next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
