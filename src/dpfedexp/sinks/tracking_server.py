"""Rounds into an MLflow run."""

from __future__ import annotations

from typing import Any

from dpfedexp.arguments import checked
from dpfedexp.engine.run import Run
from dpfedexp.sinks.sent import Sink, needed


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
