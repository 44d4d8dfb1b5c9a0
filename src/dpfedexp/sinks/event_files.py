"""Rounds into TensorBoard's event files."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any

from dpfedexp.arguments import checked
from dpfedexp.engine.run import Run
from dpfedexp.sinks.sent import Sink, needed


@checked
class TensorBoard(Sink):
    """Writes every round as scalars and the privacy statement as text; give it as `on_round` (pip install 'dpfedexp[tensorboard]').

    The wall time of an event is the number of its round.

    Args:
        folder: where the event files go; `tensorboard --logdir FOLDER` shows them.

    Example:
        train(model, clients, algorithm, on_round=TensorBoard("runs/tensorboard"), …)
    """

    outlet = "tensorboard"

    def __init__(self, folder: Path | str) -> None:
        needed("TensorBoard", "tensorboard", "tensorboard")
        self._writers = needed("TensorBoard", "torch.utils.tensorboard", "tensorboard")
        self._folder = str(folder)

    def _open(self) -> None:
        self._writer = self._writers.SummaryWriter(self._folder)

    def _send(self, round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round, walltime=float(round))
        self._writer.flush()

    def _end(self, run: Run, facts: dict[str, Any]) -> None:
        rounds = len(run.history)
        self._writer.add_text("privacy", f"```\n{run.privacy.text}```", rounds, walltime=float(rounds))
        made = Path(self._writer.file_writer.event_writer._file_name)
        self._writer.close()
        if facts.get("secure"):
            _undate(made)


def _undate(made: Path) -> None:
    """TensorBoard names a file by the second that it was made in, which tells when a secure run ended."""
    for number in itertools.count():
        plain = made.with_name(f"events.out.tfevents.{number}.dpfedexp")
        if not plain.exists():
            made.rename(plain)
            os.utime(plain, (0, 0))
            os.utime(plain.parent, (0, 0))
            return
