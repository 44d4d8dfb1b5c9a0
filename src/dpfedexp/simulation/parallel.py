"""A chunk of clients in small tiles that fit a processor's cache, several tiles at a time.

torch's own threads split each operation, wait for each other after it, and do so badly when other programs want the cores. Tiles
need no such waiting: every thread takes whole local updates.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from threading import Barrier, local

import torch
from torch import Tensor

from dpfedexp.local import Schedule
from dpfedexp.simulation.vectorise import Trainer


class Parallel:
    """Another trainer, tile by tile on as many threads as torch was given; `make` makes one for each thread.

    Threads do not share a module: torch's functional calls put parameters into it for a moment.
    """

    def __init__(self, name: str, make: Callable[[], Trainer], tile: int, threads: int | None = None) -> None:
        self.name, self.make, self.tile = name, make, tile
        self.threads = threads or torch.get_num_threads()
        self.own = local()

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Tensor | None = None
    ) -> Tensor:
        n = len(clients)
        # The last tiles decide when a chunk is done: at least a few for every thread.
        tile = max(1, min(self.tile, -(-n // (2 * self.threads)))) if self.threads > 1 else self.tile
        if n <= tile:
            return self._trainer()(w, clients, schedule, round, correction)
        out = torch.empty(n, len(w), device=w.device)

        def one(first: int) -> None:
            at = slice(first, first + tile)
            part = Schedule(schedule.positions[at], schedule.weights[at], schedule.steps[at])
            out[at] = self._trainer()(w, clients[at], part, round, None if correction is None else correction[at])

        starts = range(0, n, tile)
        if self.threads == 1:
            for first in starts:
                one(first)
        else:
            list(_pool(self.threads, os.getpid()).map(one, starts))
        return out

    def _trainer(self) -> Trainer:
        if not hasattr(self.own, "trainer"):
            self.own.trainer = self.make()
        return self.own.trainer


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
