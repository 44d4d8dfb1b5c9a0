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
    """A tracker of rounds, passed as `on_round`.

    Formal guarantee: what is sent was released, is public, or was measured by the server on data of its own; it is in the list of
    everything that leaves a run (`engine.outlets`, under `outlet`). Durations and diagnostics, which depend on the clients' data
    without noise, are not sent, in simulations either. In a secure run everything is sent after the last round, because the moment
    at which a round arrives tells how long it took; other runs send each round at once.
    """

    outlet: ClassVar[str]
    _held: list[dict[str, Any]] | None = None
    _is_open = False

    def on_train_begin(self, facts: RunFacts) -> None:
        """The run begins; a secure one is held back until its end."""
        self._held = [] if facts.secure else None

    def __call__(self, record: dict[str, Any]) -> None:
        if self._held is not None:
            self._held.append(dict(record))
            return
        self._open_once()
        self._send(record["round"], sent(self.outlet, record))

    def on_train_end(self, run: Run) -> None:
        """What was held back, what the run is, what it promises, and the end."""
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
        """Sends the numbers of a round, without any time but the number of the round."""

    @abstractmethod
    def _end(self, run: Run, facts: dict[str, Any]) -> None:
        """Sends the facts and the statement, and ends."""


def sent(outlet: str, record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round's record that may leave, without the round itself; none that depends on the clients without noise.

    >>> sent("tensorboard", {"round": 3, "test_loss": 0.5, "seconds": 1.2, "nonprivate_eta_target": 7.0})
    {'test_loss': 0.5}
    """
    public = recorded(outlet, record, secure=True)
    numbers = {name: value for name, value in public.items() if name != "round" and isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not math.isinf(value)}


def needed(sink: str, module: str, package: str) -> Any:
    """The module of an optional package; one sentence where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{sink} needs the package {package}, which is not installed; install it with: pip install 'dpfedexp[{package}]'."
        ) from None


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
            _hide_time(made)


def _hide_time(made: Path) -> None:
    """TensorBoard names a file by the second that it was made in, which tells when a secure run ended."""
    for number in itertools.count():
        plain = made.with_name(f"events.out.tfevents.{number}.dpfedexp")
        if not plain.exists():
            made.rename(plain)
            os.utime(plain, (0, 0))
            os.utime(plain.parent, (0, 0))
            return


@checked
class MLflow(Sink):
    """Logs every round as metrics, and at the end the facts and the privacy statement (pip install 'dpfedexp[mlflow]').

    The timestamp of a metric is the number of its round.

    Args:
        run_id: the MLflow run that is logged to; by default the active one, or a new one that ends with the training.
        tracking_uri: where MLflow keeps its runs, where `mlflow.set_tracking_uri` has not said it.

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
            # In the experiment that is set, but not as the active run, which would take in what others log.
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
