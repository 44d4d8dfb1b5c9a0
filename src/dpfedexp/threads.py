"""Work spread over threads: torch and numpy let go of Python's lock while they compute."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from threading import Barrier

import torch


def spread(work: Callable[[int], None], items: Iterable[int], threads: int, *, always: bool = False) -> None:
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
