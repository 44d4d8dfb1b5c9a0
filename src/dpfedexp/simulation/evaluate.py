"""How the server measures the released model while it trains: on a test set of its own, or by the caller's function."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dpfedexp.errors import InputError, require
from dpfedexp.evaluation import Evaluate, Metric, check_metrics, on_test_set
from dpfedexp.inputs import each, shape_of
from dpfedexp.losses import check_labels, check_loss
from dpfedexp.round import State
from dpfedexp.simulation.rounds import Simulation
from dpfedexp.trainers.checks.application import applied
from dpfedexp.trainers.task import Clients, first_line


def evaluation_of(
    test: tuple[Any, Any] | None,
    evaluate: Evaluate | None,
    clients: Clients,
    simulation: Simulation,
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluate | None:
    """What measures a model: `evaluate` where it is given, or the test set, which is tried on the model before the first round."""
    require(evaluate is None or callable(evaluate), f"evaluate is {evaluate!r}; it must be a function (model) → dict.")
    require(
        test is None or (isinstance(test, (tuple, list)) and len(test) == 2),
        f"test is {_kind(test)}; it must be a pair (inputs, targets).",
    )
    check_metrics(metrics)
    require(
        metrics is None or (test is not None and evaluate is None),
        "metrics are measured on test: give test=(inputs, targets) with them, and no evaluate.",
    )
    if evaluate is not None or test is None:
        return evaluate
    cast = getattr(clients, "prepare", None)
    if cast is None:
        raise InputError(
            f"test is given, but a {type(clients).__name__} has no method prepare that casts a test set as the clients' data are; "
            "give evaluate, a function (model) → dict, instead."
        )
    task = simulation.task
    inputs, targets = cast(test[0], test[1], task.device)
    measure = on_test_set(inputs, targets, task.loss, metrics=metrics)
    shapes = f"inputs of shape {shape_of(inputs)} and targets of shape {tuple(targets.shape)}"
    with torch.no_grad():
        try:
            rows = torch.tensor([0, min(1, len(targets) - 1)], device=targets.device)
            outputs = applied(copy.deepcopy(task.model).eval(), each(lambda value: value[rows], inputs))
            check_loss(task.loss, outputs, targets[rows])
            check_labels("its targets", task.loss, outputs, targets)
        except Exception as error:
            raise InputError(
                f"test has {shapes}, which do not fit the model and its loss: {first_line(error)}"
            ) from None
    return measure


def _kind(test: Any) -> str:
    counted = isinstance(test, (tuple, list))
    return f"a {type(test).__name__} of {len(test)}" if counted else f"a {type(test).__name__}"


def metrics_of(model: nn.Module, simulation: Simulation, state: State, evaluate: Evaluate) -> dict[str, float]:
    """Metrics of the released parameters in a fresh copy of the model, which no client has trained."""
    fresh = copy.deepcopy(model).to(simulation.task.device)
    simulation.task.layout.write(fresh, state.reported)
    found = evaluate(fresh.eval())
    if not isinstance(found, Mapping):
        raise InputError(
            f"evaluate returned a {type(found).__name__}; it must return a dict of numbers by name, {{'loss': 0.3}}."
        )
    return {name: _number(name, value) for name, value in found.items()}


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"evaluate returned a {type(value).__name__} for {name!r}; it must be one number.") from None
