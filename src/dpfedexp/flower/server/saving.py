"""The files of the last round on their way to the disk, while nodes already train for the next one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dpfedexp.flower.server.checkpoint import Checkpoint, Kept, save_checkpoint

_log = logging.getLogger("flwr")


class Saving:
    """Writes one checkpoint after the other on a thread of its own.

    Privacy does not rest on it: a round is charged, on disk, before it is released. A crash before its checkpoint is there makes
    the round again, which is charged again.

    Args:
        folder: of the run.

    Attributes:
        stored: whether the newest round's checkpoint is on disk, whatever became of the files beside it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.stored = folder, True
        self._kept: tuple[Kept, ...] = ()
        self._beside = ThreadPoolExecutor(1, "dpfedexp-checkpoint")
        self._under_way: Future[None] | None = None

    def begin(self, checkpoint: Checkpoint, publish: Callable[[], None]) -> None:
        """Begins to write a checkpoint, and after it what `publish` writes; `wait` comes before the next one."""

        def save() -> None:
            try:
                self._kept = save_checkpoint(self.folder, checkpoint, self._kept)
                self.stored = True
                publish()
            except Exception as error:
                _log.error("The files of round %d can't be written: %s", checkpoint.state.round, error)
                raise

        self._under_way = self._beside.submit(save)

    def wait(self) -> None:
        """Returns when all that was begun is on disk, and raises, once, what kept it from getting there."""
        if self._under_way is None:
            return
        try:
            self._under_way.result()
        finally:
            # Whoever interrupts the waiting does not end what is waited for.
            if self._under_way.done():
                self._under_way = None

    def end(self) -> BaseException | None:
        """Waits until nothing is being written any more, whoever interrupts, and returns what went wrong."""
        found: BaseException | None = None
        while self._under_way is not None:
            try:
                self.wait()
            except BaseException as error:
                found = error
        return found
