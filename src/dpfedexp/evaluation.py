"""The server's own test metric, on data that are not the clients'."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpfedexp.errors import InputError
from dpfedexp.losses import Loss

Evaluate = Callable[[nn.Module], dict[str, float]]


def on_test_set(inputs: Tensor, targets: Tensor, loss: Loss, batch: int = 2048) -> Evaluate:
    """Mean loss and, for class labels, accuracy over a test set that stays on its device."""
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise InputError(
            f"the test set has {len(inputs)} inputs and {len(targets)} targets; it needs equally many, at least 1."
        )

    def evaluate(model: nn.Module) -> dict[str, float]:
        total, right = 0.0, 0
        with torch.no_grad():
            for x, y in zip(inputs.split(batch), targets.split(batch), strict=True):
                outputs = model(x)
                total += float(loss(outputs, y).sum())
                if not y.is_floating_point() and outputs.dim() == 2:
                    right += int((outputs.argmax(1) == y).sum())
        metrics = {"test_loss": total / len(inputs)}
        if not targets.is_floating_point():
            metrics["test_accuracy"] = right / len(inputs)
        return metrics

    return evaluate
