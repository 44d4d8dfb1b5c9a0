"""Rounds into an MLflow run."""

from __future__ import annotations

from typing import Any

from dpfedexp.arguments import checked
from dpfedexp.runs.run import Run
from dpfedexp.sinks.sent import needed, sent


@checked
class MLflow:
    """Logs every round as metrics, and at the end the facts and the privacy statement (pip install 'dpfedexp[mlflow]').

    Args:
        run_id: the MLflow run that is logged to; by default the active one, or a new one that ends with the training.
        tracking_uri: where MLflow keeps its runs, where `mlflow.set_tracking_uri` has not said it.

    Example:
        train(model, clients, algorithm, on_round=MLflow(tracking_uri="sqlite:///runs.db"), …)
    """

    def __init__(self, run_id: str | None = None, tracking_uri: str | None = None) -> None:
        mlflow = needed("MLflow", "mlflow", "mlflow")
        if tracking_uri is not None:
            mlflow.set_tracking_uri(tracking_uri)
        active = mlflow.active_run()
        self._client = mlflow.MlflowClient()
        self._own = run_id is None and active is None
        if self._own:
            # In the experiment that is set, but not as the active run, which would take in what others log.
            active = mlflow.start_run()
            mlflow.end_run()
            self._client.update_run(active.info.run_id, status="RUNNING")
        self.run_id: str = run_id if run_id is not None else active.info.run_id

    def __call__(self, record: dict[str, Any]) -> None:
        for name, value in sent(record).items():
            self._client.log_metric(self.run_id, name, value, step=record["round"])

    def finished(self, run: Run) -> None:
        """What the run is, what it promises, and the end of an MLflow run that was begun here."""
        if run.facts is not None:
            facts = run.facts
            for name in ("algorithm", "data", "model", "clients", "parameters", "rounds", "delta", "secure"):
                self._client.log_param(self.run_id, name, getattr(facts, name))
        self._client.set_tag(self.run_id, "privacy", repr(run.privacy))
        self._client.log_text(self.run_id, run.privacy.text, "privacy.txt")
        if self._own:
            self._client.set_terminated(self.run_id)
