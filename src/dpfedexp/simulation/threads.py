"""Work spread over threads: torch and numpy let go of Python's lock while they compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier

import torch


def spread(work: Callable[[int], None], items: Iterable[int], threads: int) -> None:
    """`work(item)` for every item, on several threads if there are several of both; the first error is raised."""
    items = list(items)
    if threads == 1 or len(items) == 1:
        for item in items:
            work(item)
    else:
        list(_pool(threads, os.getpid()).map(work, items))


@lru_cache(maxsize=4)
def _pool(threads: int, process: int) -> ThreadPoolExecutor:
    """Threads on which torch splits nothing further; those of a parent process do not exist in a forked one, hence the key."""
    whole = torch.get_num_threads()
    pool = ThreadPoolExecutor(threads, "dpfedexp", initializer=torch.set_num_threads, initargs=(1,))
    # All of them start here, because each sets what torch gives to threads that come after it.
    together = Barrier(threads)
    list(pool.map(lambda _: together.wait(), range(threads)))
    torch.set_num_threads(whole)
    return pool
