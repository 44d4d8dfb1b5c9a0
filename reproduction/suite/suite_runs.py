"""The runs that are not recorded yet, side by side; each is one line of `runs.jsonl` as soon as it ends."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from dpfedexp.errors import InputError
from dpfedexp.machine import JobProgress, cores, prepare_worker
from dpfedexp.trainers.execution import Execution
from dpfedexp.trainers.task import Precision
from reproduction.paper.results import record as provenance
from reproduction.paper.results import record as recording
from reproduction.paper.results.planned import Result
from reproduction.paper.results.record import FILE, RESULTS_VERSION, Record, key
from reproduction.suite.problem import Folders, Problem
from reproduction.suite.problems import PROBLEMS
from reproduction.suite.suite_plan import LEADING, Size, SuiteRun, best_rate, fingerprint, grid, stages

SECTION = "suite"


@dataclass(frozen=True)
class Place:
    """Where runs are made, and how long new ones may begin.

    Attributes:
        folders: where the data lie.
        device: a torch device; None for the usual one.
        precision: of local training. A record says it beside the device.
        jobs: runs side by side, a process each; with 1, everything in this process. None for one to a core, or 4 on an
            accelerator, which small runs do not fill.
        limit_seconds: after so many seconds no further run begins, and those that run are waited for.
    """

    folders: Folders = field(default_factory=Folders)
    device: str | None = None
    precision: Precision = "fp32"
    jobs: int | None = 1
    limit_seconds: float | None = None

    @property
    def workers(self) -> int:
        cpu = (self.device or ("cuda" if torch.cuda.is_available() else "cpu")).startswith("cpu")
        return self.jobs or (cores() if cpu else 4)

    @property
    def execution(self) -> Execution:
        return Execution(device=self.device, precision=self.precision)

    def provenance(self) -> dict[str, Any]:
        made_by = provenance.here(self.device)
        return made_by if self.precision == "fp32" else {**made_by, "device": f"{made_by['device']}, {self.precision}"}


class Lines:
    """The recorded runs of a folder: `lines.result(run)`, and `lines.add(record)` for one more."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / SECTION / FILE
        _mend(self.path)
        self.records = recording.read(self.path)
        self._by_key = {record.key: record for record in self.records}
        self._data: dict[str, str | None] = {}
        for record in self.records:
            self._data[str(record.settings["problem"])] = record.images

    def data(self, problem: Problem, fingerprint: str | None) -> None:
        """From now on only lines that were made with these data count for the problem."""
        self._data[problem.name] = fingerprint

    def key(self, run: SuiteRun) -> str:
        return key(run.full_settings, self._data.get(run.problem_name))

    def result(self, run: SuiteRun) -> Result | None:
        found = None if run.contender.why_missing else self._by_key.get(self.key(run))
        return None if found is None else found.result

    def missing(self, runs: Iterable[SuiteRun]) -> list[SuiteRun]:
        """Each once, also where two contenders ask for the same run."""
        return list({self.key(run): run for run in runs if self.result(run) is None}.values())

    def add(self, run: SuiteRun, result: Result, seconds: float, made_by: dict[str, Any]) -> None:
        record = Record(
            section=SECTION,
            name=run.name,
            settings=run.full_settings,
            seed=run.seed,
            images=self._data.get(run.problem_name),
            results_version=RESULTS_VERSION,
            finals=result["finals"],
            curves=result["curves"],
            promise={name: value for name, value in result.items() if name not in ("finals", "curves")},
            seconds=round(seconds, 3),
            **made_by,
        )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(record.to_line() + "\n")
        except OSError as error:
            raise InputError(f"the file {str(self.path)!r} can't be written: {error.strerror}.") from None
        self.records.append(record)
        self._by_key[record.key] = record

    def seconds(self, problem: str) -> float:
        """What a run of the problem took so far, on average; 1 where none is recorded."""
        taken = [r.seconds for r in self.records if r.settings["problem"] == problem and r.seconds is not None]
        return fmean(taken) if taken else 1.0


@dataclass
class Outcome:
    """What a command did: runs that failed, with why, and whether it stopped before the end."""

    failed: list[str] = field(default_factory=list)
    stopped: bool = False


def run_suite(problems: Sequence[str], size: Size, folder: Path, place: Place) -> tuple[Lines, Outcome]:
    """Makes what is not recorded: first FedAvg's grid of local rates, which decides the rate of all others, then the contest."""
    chosen = [PROBLEMS[name] for name in problems]

    def first(lines: Lines) -> Iterable[SuiteRun]:
        return (run for problem in chosen for runs in grid(problem, "fedavg", LEADING, size) for run in runs)

    def contest(lines: Lines) -> Iterable[SuiteRun]:
        rated = [(problem, best_rate(problem, lines.result, size)) for problem in chosen]
        staged = [list(stages(problem, lr, size)) for problem, lr in rated if lr is not None]
        return (run for stage in zip(*staged, strict=True) for runs in stage for run in runs)

    return run_stages(chosen, folder, place, (first, contest))


def run_stages(
    problems: Sequence[Problem], folder: Path, place: Place, staged: Iterable[Callable[[Lines], Iterable[SuiteRun]]]
) -> tuple[Lines, Outcome]:
    """Makes the runs of each stage that are not recorded; a stage sees the lines of those before it."""
    lines, outcome, began = Lines(folder), Outcome(), time.monotonic()
    for problem in problems:
        lines.data(problem, fingerprint(problem, place.folders))
    made_by = place.provenance()

    def left() -> float:
        return float("inf") if place.limit_seconds is None else place.limit_seconds - (time.monotonic() - began)

    with _pool(place.workers) as pool:
        for stage in staged:
            absent = lines.missing(stage(lines))
            costs, ended = {run: lines.seconds(run.problem_name) for run in absent}, 0
            with JobProgress("suite", list(costs.values())) as progress:
                shown = partial(progress.bar.update, progress.row)
                for run, done in _finished(absent, place, pool, left, shown):
                    if isinstance(done, Exception):
                        outcome.failed.append(f"{run.name}: {done}")
                    else:
                        lines.add(run, *done, made_by)
                    progress.advance(costs[run])
                    ended += 1
            outcome.stopped |= ended < len(absent)
    return lines, outcome


def _pool(workers: int) -> AbstractContextManager[ProcessPoolExecutor | None]:
    if workers < 2:
        return nullcontext()
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(workers, mp_context=context, initializer=prepare_worker)


Done = tuple[Result, float] | Exception


def _finished(
    runs: list[SuiteRun],
    place: Place,
    pool: ProcessPoolExecutor | None,
    left: Callable[[], float],
    show: Callable[..., object],
) -> Iterator[tuple[SuiteRun, Done]]:
    """Each run as it ends, as (result, seconds) or as what went wrong. No more are begun than there are processes."""
    if pool is None:
        for run in runs:
            if left() <= 0:
                return
            show(description=run.name)
            yield run, _one(run, place)
        return
    waiting = list(reversed(runs))
    at_work: dict[Future[Done], SuiteRun] = {}
    while True:
        while waiting and len(at_work) < place.workers and left() > 0:
            run = waiting.pop()
            at_work[pool.submit(_one, run, place)] = run
        if not at_work:
            return
        first = next(iter(at_work.values())).name
        show(description=first if len(at_work) == 1 else f"{first}, and {len(at_work) - 1} more")
        for future in wait(at_work, return_when=FIRST_COMPLETED).done:
            try:
                yield at_work.pop(future), future.result()
            except BrokenExecutor:
                raise InputError(
                    "a process of the suite was killed, perhaps because memory ran out; the same command with fewer --workers goes "
                    "on from here."
                ) from None


def _one(run: SuiteRun, place: Place) -> Done:
    began = time.perf_counter()
    try:
        return run.run(place.folders, place.execution), time.perf_counter() - began
    except Exception as error:  # one run that fails must not take hundreds of others with it
        return RuntimeError(f"{type(error).__name__}: {error}")


def _mend(path: Path) -> None:
    """Cuts off a last line that was being written when the command was killed."""
    try:
        content = path.read_bytes()
        if content and not content.endswith(b"\n"):
            path.write_bytes(content[: content.rfind(b"\n") + 1])
    except FileNotFoundError:
        return
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error.strerror}.") from None
