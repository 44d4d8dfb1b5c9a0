"""Rounds into TensorBoard's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfedexp.arguments import checked
from dpfedexp.runs.run import Run
from dpfedexp.sinks.sent import needed, sent


@checked
class TensorBoard:
    """Writes every round as scalars and the privacy statement as text; give it as `on_round` (pip install 'dpfedexp[tensorboard]').

    Args:
        folder: where the event files go; `tensorboard --logdir FOLDER` shows them.

    Example:
        train(model, clients, algorithm, on_round=TensorBoard("runs/tensorboard"), …)
    """

    def __init__(self, folder: Path | str) -> None:
        needed("TensorBoard", "tensorboard", "tensorboard")
        writers = needed("TensorBoard", "torch.utils.tensorboard", "tensorboard")
        self._writer = writers.SummaryWriter(str(folder))

    def __call__(self, record: dict[str, Any]) -> None:
        for name, value in sent(record).items():
            self._writer.add_scalar(name, value, record["round"])
        self._writer.flush()

    def finished(self, run: Run) -> None:
        """The statement, and the end of the file."""
        self._writer.add_text("privacy", f"```\n{run.privacy.text}```", len(run.history))
        self._writer.close()
