"""Rounds into a Weights & Biases run."""

from __future__ import annotations

from typing import Any

from dpfedexp.arguments import checked
from dpfedexp.engine.run import Run
from dpfedexp.sinks.sent import Sink, needed


@checked
class WandB(Sink):
    """Logs every round, and at the end the facts and the privacy statement (pip install 'dpfedexp[wandb]').

    Args:
        run: what `wandb.init` returned; by default a new one of this project, which ends with the training.
        project: the project of a new one.
        mode: "online", "offline" or "disabled", for a new one; by default what W&B's own settings say.

    Example:
        train(model, clients, algorithm, on_round=WandB(project="hospitals"), …)
    """

    outlet = "wandb"

    def __init__(self, run: Any = None, project: str | None = None, mode: str | None = None) -> None:
        self._own, self._run = run is None, run
        self._wandb = needed("WandB", "wandb", "wandb") if run is None else None
        self._project, self._mode = project, mode

    def _open(self) -> None:
        if self._wandb is not None:
            self._run = self._wandb.init(project=self._project, mode=self._mode)

    def _send(self, round: int, values: dict[str, float]) -> None:
        self._run.log(values, step=round)

    def _end(self, run: Run, facts: dict[str, Any]) -> None:
        self._run.config.update(facts)
        self._run.summary["privacy"] = repr(run.privacy)
        if self._own:
            self._run.finish()
