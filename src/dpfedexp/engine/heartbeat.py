"""Noticing within seconds that another rank is gone, also where its machine vanished without closing a connection.

A round may rightly take hours, so waiting for a rank says nothing about it. Each rank therefore writes a beat to a small store of
rank 0's every few seconds, from a thread that runs beside the training; whoever stops beating is gone.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist

from dpfedexp.engine.messages import receive_text, send_text

EVERY, GONE_AFTER = 2.0, 20.0
EXIT_CODE = 3


@dataclass
class Heartbeat:
    """This rank's beat, and its watch over the others: rank 0 watches all, they watch rank 0."""

    store: dist.TCPStore
    rank: int
    world: int
    gone_after: float = GONE_AFTER
    stopped: threading.Event = field(default_factory=threading.Event)

    @staticmethod
    def start() -> Heartbeat:
        """All ranks call this together."""
        rank, world = dist.get_rank(), dist.get_world_size()
        patience = timedelta(seconds=GONE_AFTER)
        if rank == 0:
            host = os.environ.get("MASTER_ADDR") or socket.gethostname()
            server = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=patience)
            send_text(json.dumps([host, server.port]))
        else:
            host, port = json.loads(receive_text())
            server = dist.TCPStore(host, port, is_master=False, timeout=patience)
        heart = Heartbeat(server, rank, world)
        server.set(f"beat/{rank}", "0")
        dist.barrier()
        threading.Thread(target=heart._run, name="heartbeat", daemon=True).start()
        return heart

    def stop(self) -> None:
        self.stopped.set()

    def _run(self) -> None:
        watched = range(1, self.world) if self.rank == 0 else [0]
        seen = {other: ("", time.monotonic()) for other in watched}
        count = 0
        while not self.stopped.wait(EVERY):
            count += 1
            try:
                self.store.set(f"beat/{self.rank}", str(count))
                beats = {other: self.store.get(f"beat/{other}").decode() for other in watched}
            except RuntimeError:
                # Rank 0's store is gone, perhaps because the run is over and this rank is about to hear of it.
                if not self.stopped.wait(EVERY):
                    self._give_up(0)
                return
            now = time.monotonic()
            for other, beat in beats.items():
                if beat != seen[other][0]:
                    seen[other] = (beat, now)
                elif now - seen[other][1] > self.gone_after:
                    self._give_up(other)
                    return

    def _give_up(self, other: int) -> None:
        """Ends this process: its main thread waits in a collective that nothing else can interrupt.

        Everything that a resumed run needs is on disk at every instant.
        """
        if self.stopped.is_set():
            return
        sys.stderr.write(
            f"Stopped: rank {other} of {self.world} is gone (noticed by rank {self.rank}). Nothing of the round was released. "
            "The run goes on from its checkpoint with --resume, on any number of ranks.\n"
        )
        sys.stderr.flush()
        os._exit(EXIT_CODE)
