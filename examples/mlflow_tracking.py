"""Rounds in MLflow: what is released goes there, and nothing else.

pip install mlflow-skinny && python examples/mlflow_tracking.py && mlflow ui
"""

import os
import sys
from pathlib import Path

# Files in this folder; a server or a database needs no such word.
os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")

import mlflow
import torch

from dpfedexp import Federation, fit
from dpfedexp.sinks import MLflow


def main(small: bool = False) -> int:
    truth = torch.randn(5)
    clients = Federation.from_clients([(x, x @ truth) for x in torch.randn(200 if small else 1000, 8, 5)])
    model = torch.nn.Sequential(torch.nn.Linear(5, 1), torch.nn.Flatten(0))
    test = torch.randn(200, 5)
    sink = MLflow(tracking_uri=(Path.cwd() / "mlruns").as_uri())
    run = fit(model, clients, epsilon=8.0, rounds=4, evaluate=(test, test @ truth), on_round=sink)
    kept = mlflow.MlflowClient().get_metric_history(sink.run_id, "test_loss")
    print(f"{len(kept)} rounds in MLflow, ε = {run.privacy.epsilon_total:.3f}")
    return len(kept)


if __name__ == "__main__":
    main(small="--small" in sys.argv)
