"""Resources of this machine: memory, threads and parallel processes."""

import importlib.util
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
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
"""The largest share of the available memory that `zero_rows` takes."""


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
    """Return zeros [count, width]; above `most` bytes they are in an unnamed file in the temporary folder (set by TMPDIR)."""
    size = 4 * count * width
    if size <= (SHARE * available_memory() if most is None else most):
        return torch.zeros(count, width)
    try:
        with tempfile.NamedTemporaryFile(prefix="dpfedexp-rows-") as file:
            # The file is sparse: it takes no disk space until a row is written.
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
    """Return whether triton can be imported; torch for CUDA installs it."""
    return importlib.util.find_spec("triton") is not None


def run_on_threads(work: Callable[[int], None], items: Iterable[int], threads: int, *, always: bool = False) -> None:
    """Call `work(item)` for every item, on `threads` threads if there are several of both; raise the first error.

    With `always`, a single item also runs on a pool thread with one torch thread, so that it computes exactly as among others.
    """
    items = list(items)
    if threads == 1 or (len(items) == 1 and not always):
        for item in items:
            work(item)
    else:
        list(_pool(threads, os.getpid()).map(work, items))


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Return a pool of threads with one torch thread each. `process` is in the cache key because a fork does not copy threads."""
    whole = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "dpfedexp", initializer=_alone)
    # Start all threads now: each one changes the number of torch threads that later threads get.
    together = Barrier(threads)
    list(pool.map(lambda _: together.wait(), range(threads)))
    torch.set_num_threads(whole)
    return pool


def _alone() -> None:
    # The first call initializes the thread with the number of the process and would overwrite a number that was set before it.
    torch.get_num_threads()
    torch.set_num_threads(1)
    # The setting is per thread: all threads must treat subnormal numbers in the same way.
    torch.set_flush_denormal(False)


@contextmanager
def without_subnormals() -> Iterator[None]:
    """Flush results below 2⁻¹²⁶ to 0 on this thread inside the context.

    CPUs compute many times slower with such subnormal numbers. Gradients of a confident network contain many of them, so that the
    time of a client would reveal something about its data.
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
    """Call `work(job)` for every job, show progress, and return the results in the order of the jobs.

    `workers` is the number of parallel processes, by default the number of cores; with 1 the jobs run in this process.
    `cost` is the relative duration of a job, for the estimate of the remaining time.
    """
    processes = min(workers or cores(), len(jobs))
    with JobProgress(description, [cost(job) for job in jobs]) as progress, ExitStack() as stack:
        results: Iterable[Done] = map(work, jobs)
        if processes > 1:
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(processes, mp_context=context, initializer=prepare_worker)
            results = stack.enter_context(pool).map(work, jobs)
        found = []
        for job, result in zip(jobs, results, strict=True):
            found.append(result)
            progress.advance(cost(job))
        return found


class JobProgress:
    """A progress bar on stderr with the remaining time, estimated from `costs`; without a terminal, a line every 30 seconds.

    With `times=False` no durations are shown.
    """

    EVERY = 30.0

    def __init__(self, description: str, costs: Sequence[float], *, times: bool = True) -> None:
        # Imported here, so that a run from Python does not need the packages of the command line.
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
    # Ctrl-C reaches the workers too: they end at once, without tracebacks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
