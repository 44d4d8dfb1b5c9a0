"""Many independent runs at once: one process to a core, one thread to a process.

Small tensor programs spend their time waiting for each other when their threads share a core with anything else; whole runs side
by side do not.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

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
    """work(job) for every job, with a progress bar; the results are in the order of the jobs.

    `workers` processes side by side, as many as there are cores by default; with 1, one after the other in this process.
    `cost` weighs the jobs, so that the estimate of the time left knows the long ones from the short.
    """
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[done]}/{task.fields[jobs]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        transient=True,
        # The usual window of 30 seconds is shorter than one job.
        speed_estimate_period=3600.0,
    ) as bar:
        row = bar.add_task(description, total=sum(map(cost, jobs)), done=0, jobs=len(jobs))
        finished = 0

        def advance(job: Job) -> None:
            nonlocal finished
            finished += 1
            bar.update(row, advance=cost(job), done=finished)

        processes = min(workers or _cores(), len(jobs))
        if processes < 2:
            results = []
            for job in jobs:
                results.append(work(job))
                advance(job)
            return results
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(processes, mp_context=context, initializer=_prepare_worker) as pool:
            futures = {pool.submit(work, job): job for job in jobs}
            try:
                for future in as_completed(futures):
                    future.result()
                    advance(futures[future])
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _prepare_worker() -> None:
    torch.set_num_threads(1)
    # An interrupt from the keyboard reaches the workers too: they end at once, without a traceback each.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
