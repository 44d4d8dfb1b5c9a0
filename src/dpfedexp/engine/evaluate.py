"""How the server measures the released model while it trains: on a test set of its own, or by the caller's function."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dpfedexp.algorithms.round import State
from dpfedexp.core.losses import check_labels, check_loss
from dpfedexp.engine.rounds import Simulation
from dpfedexp.errors import InputError, require
from dpfedexp.evaluation import Evaluate, Metric, check_metrics, on_test_set
from dpfedexp.inputs import each, shape_of
from dpfedexp.trainers.checks import applied, first_line
from dpfedexp.trainers.task import Clients


def evaluation_of(
    test: tuple[Any, Any] | None,
    evaluate: Evaluate | None,
    clients: Clients,
    simulation: Simulation,
    model: nn.Module,
    metrics: Mapping[str, Metric] | None = None,
) -> Measuring | None:
    """What measures the model: `evaluate` where it is given, or the test set, which is tried on it before the first round."""
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
    if evaluate is not None:
        return Measuring(model, simulation, evaluate, asks=False)
    if test is None:
        return None
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
    return Measuring(model, simulation, measure, asks=True)


def _kind(test: Any) -> str:
    counted = isinstance(test, (tuple, list))
    return f"a {type(test).__name__} of {len(test)}" if counted else f"a {type(test).__name__}"


class Measuring:
    """Metrics of released parameters, in a copy of the model that no client trains.

    Every measurement has a copy of its own, because modules may remember and a caller's function may do what it likes. For a test
    set, frozen parameters are not copied, and nothing is where all modules are torch's own, which remember nothing in eval mode.

    Args:
        model: as it was given to the run.
        simulation: the run, before its first round.
        evaluate: what measures.
        asks: whether `evaluate` leaves the parameters as they were.
    """

    def __init__(self, model: nn.Module, simulation: Simulation, evaluate: Evaluate, *, asks: bool) -> None:
        self.task, self.evaluate, self.asks = simulation.task, evaluate, asks
        self.copy = copy.deepcopy(model).to(self.task.device).eval()
        held = dict(self.task.model.named_parameters())
        for name, own in self.copy.named_parameters():
            if not own.requires_grad:
                # What is frozen lies on the device once.
                own.data = held[name].data
        self.forgets = asks and all(map(_is_torchs_own, self.copy.modules()))

    def __call__(self, state: State) -> dict[str, float]:
        model = self.copy if self.forgets else self._fresh()
        self.task.layout.write(model, state.reported.to(self.task.device))
        found = self.evaluate(model)
        if not isinstance(found, Mapping):
            raise InputError(
                f"evaluate returned a {type(found).__name__}; it must return a dict of numbers by name, {{'loss': 0.3}}."
            )
        return {name: _number(name, value) for name, value in found.items()}

    def _fresh(self) -> nn.Module:
        frozen = [parameter for parameter in self.copy.parameters() if self.asks and not parameter.requires_grad]
        return copy.deepcopy(self.copy, {id(parameter): parameter for parameter in frozen})


def _is_torchs_own(module: nn.Module) -> bool:
    """Whether a module's forward is torch's, with nobody's function before or after it."""
    hooked = any(getattr(module, kind) for kind in ("_forward_hooks", "_forward_pre_hooks"))
    return type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module) and not hooked


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"evaluate returned a {type(value).__name__} for {name!r}; it must be one number.") from None
