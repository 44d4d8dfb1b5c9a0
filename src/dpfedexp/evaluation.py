"""Evaluation of released models on the server's own test set (docs/losses.md).

Metrics are computed from counts and sums over the whole test set, never as means of the metrics of batches.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dpfedexp.core.losses import Loss, LossTraits, class_dimension, loss_traits, read, resolve, same_but_singletons
from dpfedexp.core.modules import Inputs, call, each, leaves
from dpfedexp.data.arrays import check_finite
from dpfedexp.errors import InputError, checked, first_line, is_count, is_number, require

__all__ = ["Evaluate", "Evaluation", "Metric", "auc", "check_metrics", "on_test_set"]

Evaluate = Callable[[nn.Module], dict[str, float]]
Metric = Callable[[Tensor, Tensor], float]


@checked
@dataclass(frozen=True)
class Evaluation:
    """How the model of a run is evaluated: on which data, and how often.

    Args:
        on: the server's own (inputs, targets); or a function (model) → dict of numbers; or "clients": the clients evaluate the
            model on their own rows, and their results are released with noise within the same ε (docs/losses.md).
        every: number of rounds between evaluations; the last round is always evaluated. By default 1, or with "clients" ten
            evaluations in a run: fewer evaluations have less noise.
        metrics: further metrics on a test set, name → function (outputs, targets) of the whole test set (docs/losses.md).
        held_out: the share of its rows on which every client evaluates and never trains, with "clients".

    >>> Evaluation("clients", held_out=0.2).every is None
    True
    """

    on: Any
    every: int | None = None
    metrics: Mapping[str, Metric] | None = None
    held_out: float = 0.0

    def __post_init__(self) -> None:
        pair = isinstance(self.on, tuple) and len(self.on) == 2
        counted = f" of {len(self.on)}" if isinstance(self.on, tuple | list) else ""
        require(
            pair or self.by_clients or (callable(self.on) and not isinstance(self.on, type)),
            f"evaluate is {repr(self.on) if isinstance(self.on, str) else f'a {type(self.on).__name__}{counted}'}; it must be a "
            "pair (inputs, targets), a function from a model to numbers, or 'clients'.",
        )
        require(
            self.every is None or is_count(self.every), f"every is {self.every!r}; it must be a positive whole number."
        )
        check_metrics(self.metrics)
        require(
            self.metrics is None or pair,
            "metrics are measured on a test set: Evaluation((inputs, targets), metrics=…).",
        )
        require(
            is_number(self.held_out) and 0 <= self.held_out < 1 and (self.by_clients or not self.held_out),
            f"held_out is {self.held_out!r}; it must be from 0 to below 1, with Evaluation('clients', held_out=0.2).",
        )

    @property
    def by_clients(self) -> bool:
        return isinstance(self.on, str) and self.on == "clients"

    @classmethod
    def split(cls, given: "Evaluations") -> "tuple[Evaluation | None, Evaluation | None]":
        """Return the evaluation on the server's own data and the one by the clients; None for one that is not given."""
        many = given if isinstance(given, list) else [] if given is None else [given]
        ours = [one if isinstance(one, Evaluation) else cls(one) for one in many]
        server, clients = ([one for one in ours if one.by_clients is who] for who in (False, True))
        require(
            len(server) < 2 and len(clients) < 2,
            "evaluate lists two evaluations of the same kind; give at most one on the server's data and one by the clients.",
        )
        return next(iter(server), None), next(iter(clients), None)


EvaluationLike = Evaluation | Evaluate | tuple[Any, Any] | Literal["clients"]
Evaluations = EvaluationLike | list[EvaluationLike] | None
"""The type of `evaluate`: an `Evaluation`, its `on` alone, or a list of one on the server's data and one by the clients."""


@checked
def on_test_set(
    inputs: Inputs,
    targets: Tensor,
    loss: str | Loss | None = None,
    batch: int = 2048,
    *,
    metrics: Mapping[str, Metric] | None = None,
) -> Evaluate:
    """Make an evaluator: mean loss and the metrics that fit the loss and targets, over a test set.

    Class labels: `test_accuracy`, over all positions of sequences, and `test_auc` of two classes. One logit with 0/1 targets:
    `test_accuracy` and `test_auc`. Several labels per example: `test_label_accuracy` and `test_exact_match`. Numbers: `test_mae`,
    `test_rmse` and `test_r2`. Metrics that are not defined are left out (docs/losses.md).

    Args:
        inputs: the test inputs: a tensor, or a tuple or dictionary of tensors for a model with several inputs.
        targets: one per input.
        loss: a name, a torch loss, or a function (outputs, targets) → one loss per example.
        batch: the batch size of the forward pass.
        metrics: name → function (outputs, targets) → number, called once with all outputs and targets on the CPU; reported as
            `test_<name>`.

    Returns:
        A function from a model to its metrics, for `train(..., evaluate=…)`.

    Example:
        >>> inputs, targets = torch.tensor([[0.0], [1.0], [2.0]]), torch.tensor([0.0, 1.0, 3.0])
        >>> bias = lambda outputs, targets: float((outputs - targets).mean())
        >>> evaluate = on_test_set(inputs, targets, "mse", metrics={"bias": bias})
        >>> {name: round(value, 3) for name, value in evaluate(nn.Flatten(0)).items()}
        {'test_loss': 0.333, 'test_mae': 0.333, 'test_rmse': 0.577, 'test_r2': 0.786, 'test_bias': -0.333}
    """
    rows, many = len(leaves(inputs)[0]), len(targets)
    require(rows == many > 0, f"the test set has {rows} inputs and {many} targets; it needs equally many, at least 1.")
    check_metrics(metrics)
    for name, part in (("inputs", inputs), ("targets", targets)):
        for value in leaves(part):
            check_finite(f"the test set: {name}", value)
    per_example = resolve(loss, targets)

    def evaluate(model: nn.Module) -> dict[str, float]:
        # Sums stay on the device until the end, so that no batch waits for the previous one.
        total = torch.zeros((), dtype=torch.float64, device=targets.device)
        taken: list[Measure] = []
        with torch.no_grad():
            for start in range(0, len(targets), batch):
                part = slice(start, start + batch)
                y = targets[part]
                outputs = read(per_example, call(model, each(operator.itemgetter(part), inputs)))
                total = total + per_example(outputs, y).sum()
                if start == 0:
                    taken = measures(loss_traits(per_example), outputs, targets)
                    taken += [_own(metrics)] if metrics else []
                for measure in taken:
                    measure.add(outputs, y)
        found = {"test_loss": float(total) / len(targets)}
        for measure in taken:
            found |= measure.result()
        return found

    return evaluate


@dataclass
class Measure:
    """A metric of a test set: `keep` reduces each batch of outputs and targets, and `read` computes metrics from all batches."""

    name: str
    keep: Callable[[Tensor, Tensor], tuple[Any, ...]]
    read: Callable[..., dict[str, float]]
    parts: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        self.parts.append(self.keep(outputs, targets))

    def result(self) -> dict[str, float]:
        return self.read(*zip(*self.parts, strict=True))


def share(name: str, part: Callable[[Tensor, Tensor], tuple[Tensor, Tensor | int]]) -> Measure:
    """The share of correct predictions; `part` is a function of a batch: (which are correct, how many count)."""

    def keep(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        right, counted = part(outputs, targets)
        return right.sum(), counted

    def read(right: Sequence[Tensor], counted: Sequence[Tensor | int]) -> dict[str, float]:
        total = sum(map(int, counted))
        return {f"test_{name}": sum(map(int, right)) / total} if total else {}

    return Measure(name, keep, read)


def auc(scores: Tensor, positive: Tensor) -> float:
    """Compute the probability that a positive example scores above a negative one; ties count half.

    The formula is (R − p(p+1)/2) / (p·q), where R sums the ranks of the p positive examples among all p + q (ties: mean rank).
    """
    if bool(scores.isnan().any()):
        return math.nan
    _, place, many = scores.unique(return_inverse=True, return_counts=True)
    ends = many.double().cumsum(0)
    ranks = (ends - (many - 1) / 2)[place]
    p = int(positive.sum())
    q = len(positive) - p
    return (float(ranks[positive].sum()) - p * (p + 1) / 2) / (p * q)


def errors(targets: Tensor, log: bool) -> Measure:
    """Mean absolute and root mean squared error over all numbers, and R² (the mean over the outputs, if there are several).

    R² is 1 − Σ(target − prediction)²/Σ(target − mean)². It is undefined, and left out, if a column of targets is constant.
    """
    rows = targets.flatten(1) if targets.dim() > 1 else targets[:, None]
    mean = rows.double().mean(0)
    spread = sum(((part.double() - mean).square().sum(0) for part in rows.split(65536)), torch.zeros_like(mean))

    def keep(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        predicted = outputs.exp() if log else outputs
        off = (predicted.double().reshape(targets.shape) - targets.double()).reshape(len(targets), -1)
        return off.square().sum(0), off.abs().sum()

    def read(squares: Sequence[Tensor], absolute: Sequence[Tensor]) -> dict[str, float]:
        square = sum(squares, torch.zeros_like(mean))
        found = {"test_mae": float(sum(absolute)) / targets.numel()}
        found["test_rmse"] = math.sqrt(float(square.sum()) / targets.numel())
        if bool((spread > 0).all()):
            found["test_r2"] = float((1 - square / spread).mean())
        return found

    return Measure("errors", keep, read)


def _own(metrics: Mapping[str, Metric]) -> Measure:
    def keep(outputs: Any, targets: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"metrics are functions of one tensor of outputs, and the model returns a {type(outputs).__name__}; give "
                "evaluate, a function (model) → dict, instead."
            )
        return outputs.cpu(), targets.cpu()

    def measure(*parts: tuple[Tensor, ...]) -> dict[str, float]:
        outputs, targets = map(torch.cat, parts)
        found = {}
        for name, metric in metrics.items():
            try:
                value: Any = metric(outputs, targets)
            except Exception as error:
                raise InputError(
                    f"metrics[{name!r}] can't be applied to outputs of shape {tuple(outputs.shape)} and targets of shape "
                    f"{tuple(targets.shape)}: {first_line(error)}"
                ) from error
            try:
                found[f"test_{name.removeprefix('test_')}"] = float(value)
            except (TypeError, ValueError, RuntimeError):
                raise InputError(
                    f"metrics[{name!r}] returned a {type(value).__name__}; it must return one number for the whole test set."
                ) from None
        return found

    return Measure("own", keep, measure)


def check_metrics(metrics: Any) -> None:
    """Raise `InputError` unless `metrics` is None or a mapping from names to functions."""
    if metrics is None:
        return
    require(
        isinstance(metrics, Mapping) and all(isinstance(name, str) and name for name in metrics),
        f"metrics is a {type(metrics).__name__}; it must be a dict such as "
        "{'bias': lambda outputs, targets: float((outputs - targets).mean())}.",
    )
    require(
        "loss" not in metrics and "test_loss" not in metrics,
        "metrics has a 'loss', but the name test_loss is taken by the training loss on the test set; give it another name.",
    )
    for name, metric in metrics.items():
        function = callable(metric) and not isinstance(metric, type)
        require(function, f"metrics[{name!r}] is {metric!r}; it must be a function (outputs, targets) → number.")


def measures(traits: LossTraits, outputs: Any, targets: Tensor) -> list[Measure]:
    """Return the metrics that are defined for the loss, the first batch of outputs, and all targets."""
    # Only the loss knows how to read outputs of several parts, so no metric is defined.
    if not isinstance(outputs, Tensor) or targets.numel() == 0:
        return []
    some = targets[: len(outputs)]
    classes = class_dimension(outputs, some, second=traits.second)
    if traits.kind in ("classes", "unknown") and classes is not None and outputs.shape[classes] > 1:
        return _of_classes(traits, targets, outputs.shape[classes])
    if not same_but_singletons(outputs, some):
        return []
    zero_one = bool(((targets == 0) | (targets == 1)).all())
    single = targets.numel() == len(targets)

    def right(o: Tensor, t: Tensor) -> Tensor:
        return ((o.reshape(t.shape) > traits.threshold) == (t > 0.5)).reshape(len(t), -1)

    match traits.kind:
        case "binary" if zero_one and single:
            return [share("accuracy", lambda o, t: (right(o, t), len(t))), *_auc(targets, lambda o: o)]
        case "binary" if zero_one:
            labels = share("label_accuracy", lambda o, t: (right(o, t), t.numel()))
            return [labels, share("exact_match", lambda o, t: (right(o, t).all(1), len(t)))]
        case "numbers":
            return [errors(targets, traits.log)]
        # The outputs for a custom loss may be logits or probabilities; the AUC depends only on their order.
        case "unknown" if zero_one:
            return _auc(targets, lambda o: o) if single else []
        case "unknown" if targets.is_floating_point():
            return [errors(targets, log=False)]
    return []


def majority_share(loss: Loss, outputs: Any, targets: Tensor) -> float | None:
    """Compute the accuracy of always predicting the most frequent class of the targets; None where accuracy is not defined."""
    traits = loss_traits(loss)
    taken = measures(traits, outputs, targets)
    if not any(one.name == "accuracy" for one in taken):
        return None
    labels = targets[targets != traits.ignored].flatten()
    return int(labels.unique(return_counts=True)[1].max()) / len(labels)


def _of_classes(traits: LossTraits, targets: Tensor, classes: int) -> list[Measure]:
    labels = targets[targets != traits.ignored]
    if targets.is_floating_point() or labels.numel() == 0 or int(labels.min()) < 0 or int(labels.max()) >= classes:
        return []

    def highest(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor | int]:
        """Return where the class with the highest output is the label, and how many positions have a label that is not ignored."""
        at, counts = class_dimension(outputs, targets, second=traits.second), targets != traits.ignored
        return (counts & False, 0) if at is None else ((outputs.argmax(at) == targets) & counts, counts.sum())

    two = classes == 2 and targets.dim() == 1 and len(labels) == len(targets)
    return [share("accuracy", highest), *(_auc(targets, lambda o: o[:, 1] - o[:, 0]) if two else [])]


def _auc(targets: Tensor, score: Callable[[Tensor], Tensor]) -> list[Measure]:
    """Return the AUC of class 1 against class 0 if both occur in the targets. All scores are kept, because AUC needs ranks."""
    if not bool((targets > 0.5).any()) or not bool((targets < 0.5).any()):
        return []

    def keep(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return score(outputs).flatten(), targets.flatten() > 0.5

    return [Measure("auc", keep, lambda scores, positive: {"test_auc": auc(torch.cat(scores), torch.cat(positive))})]
