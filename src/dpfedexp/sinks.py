"""Experiment trackers for `on_round`: TensorBoard, MLflow and Weights & Biases."""

import itertools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

from dpfedexp.engine.outlets import FACTS, recorded
from dpfedexp.engine.run import Run, RunFacts
from dpfedexp.errors import InputError, checked

__all__ = ["MLflow", "TensorBoard", "WandB"]

SHOWN_FACTS = ("algorithm", "data", "model", "clients", "parameters", "rounds", "delta", "secure")


class Sink(ABC):
    """Base class of experiment trackers, passed as `on_round`.

    Formal guarantee: only values are sent that were released, are public, or were measured by the server on its own data, and that
    `engine.outlets` lists under the name `outlet`. Durations and diagnostics, which depend on the clients' data without noise, are
    never sent, also not in simulations. A secure run sends everything after the last round, because the arrival time of a round
    reveals how long it took; other runs send each round at once.
    """

    outlet: ClassVar[str]
    _held: list[dict[str, Any]] | None = None
    _is_open = False

    def on_train_begin(self, facts: RunFacts) -> None:
        """Start a run; the records of a secure run are held back until its end."""
        self._held = [] if facts.secure else None

    def __call__(self, record: dict[str, Any]) -> None:
        if self._held is not None:
            self._held.append(dict(record))
            return
        self._open_once()
        self._send(record["round"], sent(self.outlet, record))

    def on_train_end(self, run: Run) -> None:
        """Send the records that were held back, the facts of the run and its privacy statement, and close the tracker."""
        self._open_once()
        for record in self._held or ():
            self._send(record["round"], sent(self.outlet, record))
        self._held = None
        facts = {} if run.facts is None else {name: getattr(run.facts, name) for name in SHOWN_FACTS}
        self._end(run, recorded(FACTS, facts, secure=True))

    def _open_once(self) -> None:
        if not self._is_open:
            self._open()
        self._is_open = True

    @abstractmethod
    def _open(self) -> None: ...

    @abstractmethod
    def _send(self, round: int, values: dict[str, float]) -> None:
        """Send the numbers of a round, with the round number as the only time."""

    @abstractmethod
    def _end(self, run: Run, facts: dict[str, Any]) -> None:
        """Send the facts and the privacy statement, and close the tracker."""


def sent(outlet: str, record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record that may be sent to `outlet`, without the round; none depends on clients' data without noise.

    >>> sent("tensorboard", {"round": 3, "test_loss": 0.5, "seconds": 1.2, "nonprivate_eta_target": 7.0})
    {'test_loss': 0.5}
    """
    public = recorded(outlet, record, secure=True)
    numbers = {name: value for name, value in public.items() if name != "round" and isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not math.isinf(value)}


def needed(sink: str, module: str, package: str) -> Any:
    """Import a module of an optional package; raise `InputError` with the install command if it is missing."""
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{sink} needs the package {package}, which is not installed; install it with: pip install 'dpfedexp[{package}]'."
        ) from None


@checked
class TensorBoard(Sink):
    """Write every round as scalars and the privacy statement as text; pass it as `on_round` (pip install 'dpfedexp[tensorboard]').

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
            _hide_time(made)


def _hide_time(made: Path) -> None:
    """Rename an event file without its date, which would reveal when a secure run ended, and reset its time stamps."""
    for number in itertools.count():
        plain = made.with_name(f"events.out.tfevents.{number}.dpfedexp")
        if not plain.exists():
            made.rename(plain)
            os.utime(plain, (0, 0))
            os.utime(plain.parent, (0, 0))
            return


@checked
class MLflow(Sink):
    """Log every round as metrics, and at the end the facts and the privacy statement (pip install 'dpfedexp[mlflow]').

    The timestamp of a metric is the number of its round.

    Args:
        run_id: the MLflow run that is logged to; by default the active one, or a new one that ends with the training.
        tracking_uri: where MLflow stores its runs; by default as set by `mlflow.set_tracking_uri`.

    Example:
        train(model, clients, algorithm, on_round=MLflow(tracking_uri="sqlite:///runs.db"), …)
    """

    outlet = "mlflow"

    def __init__(self, run_id: str | None = None, tracking_uri: str | None = None) -> None:
        self._mlflow = needed("MLflow", "mlflow", "mlflow")
        if tracking_uri is not None:
            self._mlflow.set_tracking_uri(tracking_uri)
        self._client = self._mlflow.MlflowClient()
        self.run_id = run_id

    def _open(self) -> None:
        active = self._mlflow.active_run()
        self._own = self.run_id is None and active is None
        if self._own:
            # A run in the current experiment, but not the active one, to which other code might log.
            active = self._mlflow.start_run(log_system_metrics=False)
            self._mlflow.end_run()
            self._client.update_run(active.info.run_id, status="RUNNING")
        if self.run_id is None:
            self.run_id = active.info.run_id

    def _send(self, round: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self.run_id, name, value, timestamp=round, step=round)

    def _end(self, run: Run, facts: dict[str, Any]) -> None:
        for name, value in facts.items():
            self._client.log_param(self.run_id, name, value)
        self._client.set_tag(self.run_id, "privacy", repr(run.privacy))
        self._client.log_text(self.run_id, run.privacy.text, "privacy.txt")
        if self._own:
            self._client.set_terminated(self.run_id)


@checked
class WandB(Sink):
    """Log every round, and at the end the facts and the privacy statement (pip install 'dpfedexp[wandb]').

    Args:
        run: the return value of `wandb.init`; by default a new run of `project`, which ends with the training.
        project: the project of the new run.
        mode: "online", "offline" or "disabled", for the new run; by default W&B's own setting.

    Example:
        train(model, clients, algorithm, on_round=WandB(project="hospitals"), …)
    """

    outlet = "wandb"

    def __init__(self, run: Any = None, project: str | None = None, mode: str | None = None) -> None:
        self._run = run
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
        if self._wandb is not None:
            self._run.finish()
