"""A chunk of clients in small tiles that fit a processor's cache, several tiles at a time.

torch's own threads split each operation, wait for each other after it, and do so badly when other programs want the cores. Tiles
need no such waiting: every thread takes whole local updates.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import local

import torch
from torch import Tensor

from dpfedexp.core.batches import Schedule
from dpfedexp.machine import spread, without_subnormals
from dpfedexp.trainers.stepped import Steps
from dpfedexp.trainers.task import Trainer


class Parallel:
    """Another trainer, tile by tile on as many threads as torch was given; `make` makes one for each thread.

    Threads do not share a module: torch's functional calls put parameters into it for a moment. With `fixed` every tile has the
    same number of clients and trains on such a thread, however many clients there are; the caller fills up the last one.
    """

    def __init__(
        self, name: str, make: Callable[[], Trainer], tile: int, threads: int | None = None, *, fixed: bool = False
    ) -> None:
        self.name, self.make, self.tile, self.fixed = name, make, tile, fixed
        self.unit = tile
        self.threads = threads or torch.get_num_threads()
        self.own = local()

    @property
    def in_flight(self) -> int:
        """How many clients train at a time."""
        return self.tile * self.threads

    def __call__(
        self,
        w: Tensor,
        clients: Tensor,
        schedule: Schedule,
        round: int,
        correction: Tensor | None = None,
        rates: Tensor | None = None,
    ) -> Tensor:
        n = len(clients)
        tile = self.tile
        if not self.fixed:
            # The last tiles decide when a chunk is done: at least a few for every thread.
            tile = max(1, min(self.tile, -(-n // (2 * self.threads)))) if self.threads > 1 else self.tile
            if n <= tile:
                with without_subnormals():
                    return self._trainer()(w, clients, schedule, round, correction, rates)
        out = torch.empty(n, len(w), device=w.device)

        def one(first: int) -> None:
            at = slice(first, first + tile)
            own, rate = (None if rows is None else rows[at] for rows in (correction, rates))
            trainer = self._trainer()
            with without_subnormals():
                if isinstance(trainer, Steps):
                    # A row as large as a cache is written where it stays, and not copied there.
                    trainer(w, clients[at], schedule.part(at), round, own, rate, out=out[at])
                else:
                    out[at] = trainer(w, clients[at], schedule.part(at), round, own, rate)

        spread(one, range(0, n, tile), self.threads, always=self.fixed)
        return out

    def _trainer(self) -> Trainer:
        if not hasattr(self.own, "trainer"):
            self.own.trainer = self.make()
        trainer: Trainer = self.own.trainer
        return trainer
