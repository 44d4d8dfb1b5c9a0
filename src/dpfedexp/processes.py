"""Many independent runs at once: one process to a core, one thread to a process.

Small tensor programs spend their time waiting for each other when their threads share a core with anything else; whole runs side
by side do not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import timedelta
from typing import TypeVar

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

Job = TypeVar("Job")
Done = TypeVar("Done")


def run_all(
    work: Callable[[Job], Done],
    jobs: Sequence[Job],
    description: str,
    *,
    workers: int | None = None,
    cost: Callable[[Job], float] = lambda job: 1.0,
) -> list[Done]:
    """work(job) for every job, showing progress; the results are in the order of the jobs.

    `workers` processes side by side, as many as there are cores by default; with 1, one after the other in this process.
    `cost` weighs the jobs, so that the estimate of the time left knows the long ones from the short.
    """
    processes = min(workers or cores(), len(jobs))
    with JobProgress(description, [cost(job) for job in jobs]) as progress:
        if processes < 2:
            results = []
            for job in jobs:
                results.append(work(job))
                progress.advance(cost(job))
            return results
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context, initializer=prepare_worker) as pool:
            futures = {pool.submit(work, job): job for job in jobs}
            try:
                for future in as_completed(futures):
                    future.result()
                    progress.advance(cost(futures[future]))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]


class JobProgress:
    """A bar with the time left, on stderr; where there is no terminal, a line every half minute instead.

    Without `times` it shows no durations.
    """

    EVERY = 30.0

    def __init__(self, description: str, costs: Sequence[float], *, times: bool = True) -> None:
        self.times = times
        self.description, self.jobs, self.total = description, len(costs), sum(costs)
        self.finished, self.spent, self.began = 0, 0.0, time.monotonic()
        self.last_shown = self.began
        self.console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[shown]}"),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self.row = self.bar.add_task(description, total=self.total, shown=self.text)

    def __enter__(self) -> JobProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    @property
    def text(self) -> str:
        if not self.times:
            return f"{self.finished}/{self.jobs}"
        elapsed = time.monotonic() - self.began
        left = elapsed * (self.total - self.spent) / self.spent if self.spent else None
        about = "" if left is None else f", about {_clock(left)} left"
        return f"{self.finished}/{self.jobs} in {_clock(elapsed)}{about}"

    def advance(self, cost: float) -> None:
        self.finished += 1
        self.spent += cost
        self.bar.update(self.row, completed=self.spent, shown=self.text)
        if not self.console.is_terminal and time.monotonic() - self.last_shown >= self.EVERY:
            self.last_shown = time.monotonic()
            self.console.print(f"{self.description}: {self.text}", highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_worker() -> None:
    torch.set_num_threads(1)
    # An interrupt from the keyboard reaches the workers too: they end at once, without a traceback each.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
