"""Many independent runs at once: one process to a core, one thread to a process.

Small tensor programs spend their time waiting for each other when their threads share a core with anything else; whole runs side
by side do not.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Job = TypeVar("Job")
Done = TypeVar("Done")


def run_all(work: Callable[[Job], Done], jobs: Sequence[Job], description: str, *, on_device: bool = False) -> list[Done]:
    """work(job) for every job, in the order of the jobs, with a progress bar; one after the other on a GPU or a single core."""
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        transient=True,
    ) as bar:
        row = bar.add_task(description, total=len(jobs))
        workers = min(_cores(), len(jobs))
        if on_device or workers < 2:
            results = []
            for job in jobs:
                results.append(work(job))
                bar.advance(row)
            return results
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, mp_context=context, initializer=_single_thread) as pool:
            futures = [pool.submit(work, job) for job in jobs]
            try:
                for future in as_completed(futures):
                    future.result()
                    bar.advance(row)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            return [future.result() for future in futures]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _single_thread() -> None:
    torch.set_num_threads(1)
