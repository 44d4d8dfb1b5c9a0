"""The server's own test metrics, on data that are not the clients'."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from dpfedexp.core.losses import Loss, read, reading_of, resolve
from dpfedexp.errors import InputError, checked
from dpfedexp.evaluation.measures import Measure, Metric, OwnMetrics, check_metrics, measures
from dpfedexp.inputs import Inputs, call, each, leaves

Evaluate = Callable[[nn.Module], dict[str, float]]


@checked
def on_test_set(
    inputs: Inputs,
    targets: Tensor,
    loss: str | Loss | None = None,
    batch: int = 2048,
    *,
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluate:
    """Mean loss, and whatever else is defined for this loss and these targets, over a test set that stays on its device.

    Class labels: `test_accuracy`, over all positions of sequences, and `test_auc` of two classes. One logit with 0/1 targets:
    `test_accuracy` and `test_auc`. Several labels per example: `test_label_accuracy` and `test_exact_match`. Numbers: `test_mae`,
    `test_rmse` and `test_r2`. What is not defined is not reported (docs/losses.md).

    Args:
        inputs: of the test set: a tensor, or a tuple or dictionary of them for a model of several inputs.
        targets: one per input; what they are for is remembered, so NumPy must not change them afterwards.
        loss: a name, a loss of torch, or a function (outputs, targets) → one loss per example.
        batch: rows that go through the model at a time.
        metrics: name → function (outputs, targets) → number, called once with all outputs and targets on the CPU; reported with
            test_ before the name.

    Returns:
        A function from a model to its metrics, for `train(..., evaluate=…)`.

    Example:
        >>> inputs, targets = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0.0, 1.0, 3.0])
        >>> bias = lambda outputs, targets: float((outputs - targets).mean())
        >>> evaluate = on_test_set(inputs, targets, "mse", metrics={"bias": bias})
        >>> {name: round(value, 3) for name, value in evaluate(nn.Flatten(0)).items()}
        {'test_loss': 0.333, 'test_mae': 0.333, 'test_rmse': 0.577, 'test_r2': 0.786, 'test_bias': -0.333}
    """
    rows = len(leaves(inputs)[0])
    if rows != len(targets) or rows == 0:
        raise InputError(
            f"the test set has {rows} inputs and {len(targets)} targets; it needs equally many, at least 1."
        )
    check_metrics(metrics)
    per_example = resolve(loss, targets)

    known: dict[tuple[object, ...], list[Measure]] = {}

    def fresh(outputs: Tensor) -> list[Measure]:
        """What is measured, with nothing added yet. What that is follows from shapes and targets, and is asked once."""
        asked = (outputs.shape[1:], None if targets.is_inference() else targets._version)
        if asked not in known:
            known.clear()
            known[asked] = measures(reading_of(per_example), outputs, targets)
        return copy.deepcopy(known[asked])

    def evaluate(model: nn.Module) -> dict[str, float]:
        # Numbers stay on the device until all is asked: nobody waits for a batch before the next.
        total = torch.zeros((), dtype=torch.float64, device=targets.device)
        taken: list[Measure] = []
        with torch.no_grad():
            for start in range(0, len(targets), batch):
                part = slice(start, start + batch)
                y = targets[part]
                outputs = read(per_example, call(model, _rows(inputs, part)))
                total = total + per_example(outputs, y).sum()
                if start == 0:
                    # Outputs of several parts are the loss's own business: nothing else is known of them.
                    taken = fresh(outputs) if isinstance(outputs, Tensor) else []
                    taken += [OwnMetrics(metrics)] if metrics else []
                for measure in taken:
                    measure.add(outputs, y)
        found = {"test_loss": float(total) / len(targets)}
        for measure in taken:
            found |= measure.result()
        return found

    return evaluate


def _rows(inputs: Inputs, part: slice) -> Inputs:
    return each(lambda value: value[part], inputs)
