"""The files of the last round on their way to the disk, while nodes already train for the next one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from dpfedexp.flower.server.checkpoint import Checkpoint, Kept, save_checkpoint


class Saving:
    """Writes one checkpoint after the other on a thread of its own.

    Formal guarantee: none is needed for privacy, since a round is charged, on disk, before it is released. A crash before its
    checkpoint is there makes the round again, which is charged again.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._kept: tuple[Kept, ...] = ()
        self._beside = ThreadPoolExecutor(1, "dpfedexp-checkpoint")
        self._under_way: Future[None] | None = None

    def begin(self, checkpoint: Checkpoint, publish: Callable[[], None]) -> None:
        """Begins to write a checkpoint, and after it what `publish` writes; `wait` comes before the next one."""

        def save() -> None:
            self._kept = save_checkpoint(self.folder, checkpoint, self._kept)
            publish()

        self._under_way = self._beside.submit(save)

    def wait(self) -> None:
        """Returns when all that was begun is on disk, and raises what kept it from getting there."""
        saving, self._under_way = self._under_way, None
        if saving is not None:
            saving.result()
