"""Resources of this machine: memory, threads and parallel processes."""

import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Barrier
from typing import Self, TypeVar

import torch
from torch import Tensor

from dpfedexp.errors import InputError

Job = TypeVar("Job")
Done = TypeVar("Done")

SHARE = 0.25
"""Of the memory that is free, at most this much goes into rows."""


def available_memory() -> int:
    """Available memory in bytes; 4 GiB where the system does not say."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 4 * 2**30


def total_memory() -> int:
    """Total memory in bytes; 4 GiB where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 4 * 2**30


def zero_rows(count: int, width: int, most: int | None = None) -> Tensor:
    """Zeros [count, width]. Above `most` bytes they are pages of a nameless file in the temporary folder, which TMPDIR moves."""
    size = 4 * count * width
    if size <= (SHARE * available_memory() if most is None else most):
        return torch.zeros(count, width)
    try:
        with tempfile.NamedTemporaryFile(prefix="dpfedexp-rows-") as file:
            # A file that was only lengthened takes no room until a row is written.
            file.truncate(size)
            return torch.from_file(file.name, shared=True, size=count * width).view(count, width)
    except (OSError, RuntimeError) as error:
        folder = tempfile.gettempdir()
        raise InputError(
            f"the clients' own state takes {size / 1e9:.1f} GB, which does not fit in memory, and {folder!r} can't hold it: "
            f"{error}. Set TMPDIR to a folder with that much room."
        ) from None


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether files that are written for triton can be imported; torch brings it along on CUDA."""
    return importlib.util.find_spec("triton") is not None


def run_on_threads(work: Callable[[int], None], items: Iterable[int], threads: int, *, always: bool = False) -> None:
    """`work(item)` for every item, on several threads if there are several of both; the first error is raised.

    With `always` a single item too goes to a thread on which torch splits nothing further, so that it computes as among others.
    """
    items = list(items)
    if threads == 1 or (len(items) == 1 and not always):
        for item in items:
            work(item)
    else:
        list(_pool(threads, os.getpid()).map(work, items))


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads on which torch splits nothing further; those of a parent process do not exist in a forked one, hence the key."""
    whole = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "dpfedexp", initializer=_alone)
    # All of them start here, because each sets what torch gives to threads that come after it.
    together = Barrier(threads)
    list(pool.map(lambda _: together.wait(), range(threads)))
    torch.set_num_threads(whole)
    return pool


def _alone() -> None:
    # The first question makes torch set a thread up with the number of the whole process; one set before it would be lost.
    torch.get_num_threads()
    torch.set_num_threads(1)
    # A thread's own setting: all of them must treat the smallest numbers alike.
    torch.set_flush_denormal(False)


@contextmanager
def without_subnormals() -> Iterator[None]:
    """Results below 2⁻¹²⁶ are 0 on this thread meanwhile.

    A processor computes with such numbers many times slower: gradients of a network that is sure of its answer are full of them,
    and how long a client takes would tell so.
    """
    before = float(torch.tensor(2.0**-126) * 0.5) == 0.0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def run_jobs(
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
    """A bar on stderr with the time left, which it weighs by cost; where there is no terminal, a line every half minute instead.

    Without `times` it shows no durations.
    """

    EVERY = 30.0

    def __init__(self, description: str, costs: Sequence[float], *, times: bool = True) -> None:
        # Here, so that a run from Python needs no package of the command line.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.jobs, self.finished, self.last_shown = len(costs), 0, time.monotonic()
        columns = (TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.fields[shown]}"))
        clocks = (TimeElapsedColumn(), TimeRemainingColumn()) if times else ()
        self.console = Console(stderr=True)
        self.bar = Progress(
            *columns, *clocks, console=self.console, transient=True, disable=not self.console.is_terminal
        )
        self.row = self.bar.add_task(description, total=sum(costs), shown=f"0/{self.jobs}")

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def advance(self, cost: float) -> None:
        self.finished += 1
        shown = f"{self.finished}/{self.jobs}"
        self.bar.update(self.row, advance=cost, shown=shown)
        if not self.console.is_terminal and time.monotonic() - self.last_shown >= self.EVERY:
            self.last_shown = time.monotonic()
            self.console.print(f"{self.bar.tasks[0].description}: {shown}", highlight=False, soft_wrap=True)


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def prepare_worker() -> None:
    torch.set_num_threads(1)
    # An interrupt from the keyboard reaches the workers too: they end at once, without a traceback each.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
