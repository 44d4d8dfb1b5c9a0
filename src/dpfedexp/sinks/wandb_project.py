"""Rounds into a Weights & Biases run."""

from __future__ import annotations

from typing import Any

from dpfedexp.arguments import checked
from dpfedexp.runs.run import Run
from dpfedexp.sinks.sent import needed, sent


@checked
class WandB:
    """Logs every round, and at the end the facts and the privacy statement (pip install 'dpfedexp[wandb]').

    Args:
        run: what `wandb.init` returned; by default a new one of this project, which ends with the training.
        project: the project of a new one.
        mode: "online", "offline" or "disabled", for a new one; by default what W&B's own settings say.

    Example:
        train(model, clients, algorithm, on_round=WandB(project="hospitals"), …)
    """

    def __init__(self, run: Any = None, project: str | None = None, mode: str | None = None) -> None:
        self._own = run is None
        self._run = needed("WandB", "wandb", "wandb").init(project=project, mode=mode) if run is None else run

    def __call__(self, record: dict[str, Any]) -> None:
        self._run.log(sent(record), step=record["round"])

    def finished(self, run: Run) -> None:
        """What the run is, what it promises, and the end of a W&B run that was begun here."""
        if run.facts is not None:
            names = ("algorithm", "data", "model", "clients", "parameters", "rounds", "delta", "secure")
            self._run.config.update({name: getattr(run.facts, name) for name in names})
        self._run.summary["privacy"] = repr(run.privacy)
        if self._own:
            self._run.finish()
