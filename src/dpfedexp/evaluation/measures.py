"""What is measured over a whole test set: counts and sums that batches add to, never means of batches' values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from dpfedexp.core.losses import Reading
from dpfedexp.core.losses.shapes import class_dimension, same_but_ones
from dpfedexp.errors import InputError

Metric = Callable[[Tensor, Tensor], float]


class Measure(Protocol):
    """Takes batches of outputs and targets, and has its numbers at the end."""

    def add(self, outputs: Tensor, targets: Tensor) -> None: ...

    def result(self) -> dict[str, float]: ...


class Accuracy:
    """The share of labels that have the highest output, over all positions whose label counts."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.right: Tensor | int = 0
        self.counted: Tensor | int = 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        at = class_dimension(outputs, targets, second=self.reading.second)
        if at is None:
            return
        counts = targets != self.reading.ignored
        self.right = self.right + ((outputs.argmax(at) == targets) & counts).sum()
        self.counted = self.counted + counts.sum()

    def result(self) -> dict[str, float]:
        counted = int(self.counted)
        return {"test_accuracy": int(self.right) / counted} if counted else {}


class BinaryAccuracy:
    """The share of examples whose one output is on the right side of the threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.right, self.counted = threshold, 0, 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        self.right += int(((outputs.flatten() > self.threshold) == (targets.flatten() > 0.5)).sum())
        self.counted += len(targets)

    def result(self) -> dict[str, float]:
        return {"test_accuracy": self.right / self.counted}


class LabelAccuracy:
    """Of several 0/1 labels per example: the share of all labels that are right, and of examples of which every label is."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self.right, self.exact, self.labels, self.examples = threshold, 0, 0, 0, 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        right = ((outputs.reshape(targets.shape) > self.threshold) == (targets > 0.5)).flatten(1)
        self.right += int(right.sum())
        self.exact += int(right.all(1).sum())
        self.labels += right.numel()
        self.examples += len(right)

    def result(self) -> dict[str, float]:
        return {"test_label_accuracy": self.right / self.labels, "test_exact_match": self.exact / self.examples}


class Auc:
    """The probability that an example of class 1 scores above one of class 0, ties counting half.

    A rank statistic needs every score: one number per example is kept.
    """

    def __init__(self, score: Callable[[Tensor], Tensor]) -> None:
        self.score = score
        self.scores: list[Tensor] = []
        self.targets: list[Tensor] = []

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        self.scores.append(self.score(outputs).flatten())
        self.targets.append(targets.flatten() > 0.5)

    def result(self) -> dict[str, float]:
        return {"test_auc": auc(torch.cat(self.scores), torch.cat(self.targets))}


def auc(scores: Tensor, positive: Tensor) -> float:
    """(R − p(p+1)/2) / (p·q) of the p positive ones' ranks R among all p + q, equal scores sharing their mean rank."""
    if bool(scores.isnan().any()):
        return math.nan
    _, place, many = scores.unique(return_inverse=True, return_counts=True)
    ends = many.double().cumsum(0)
    ranks = (ends - (many - 1) / 2)[place]
    p = int(positive.sum())
    q = len(positive) - p
    return (float(ranks[positive].sum()) - p * (p + 1) / 2) / (p * q)


class Errors:
    """Mean absolute and root mean squared error over all numbers, and R², for several outputs the mean of theirs.

    R² is 1 − Σ(target − prediction)²/Σ(target − mean)²; a column of targets that never changes has none, and then it is left out.
    """

    def __init__(self, targets: Tensor, log: bool) -> None:
        rows = targets.flatten(1) if targets.dim() > 1 else targets[:, None]
        mean = rows.double().mean(0)
        self.spread = torch.zeros_like(mean)
        for part in rows.split(65536):
            self.spread += (part.double() - mean).square().sum(0)
        self.log = log
        self.squares, self.absolute, self.count = torch.zeros_like(mean), 0.0, 0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        predicted = outputs.exp() if self.log else outputs
        off = (predicted.double().reshape(targets.shape) - targets.double()).reshape(len(targets), -1)
        self.squares += off.square().sum(0)
        self.absolute += float(off.abs().sum())
        self.count += off.numel()

    def result(self) -> dict[str, float]:
        found = {
            "test_mae": self.absolute / self.count,
            "test_rmse": math.sqrt(float(self.squares.sum()) / self.count),
        }
        if bool((self.spread > 0).all()):
            found["test_r2"] = float((1 - self.squares / self.spread).mean())
        return found


class OwnMetrics:
    """The caller's functions of all outputs and all targets, which are kept on the CPU for them."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.metrics = metrics
        self.outputs: list[Tensor] = []
        self.targets: list[Tensor] = []

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        if not isinstance(outputs, Tensor):
            raise InputError(
                f"metrics are functions of one tensor of outputs, and the model returns a {type(outputs).__name__}; give "
                "evaluate, a function (model) → dict, instead."
            )
        self.outputs.append(outputs.cpu())
        self.targets.append(targets.cpu())

    def result(self) -> dict[str, float]:
        outputs, targets = torch.cat(self.outputs), torch.cat(self.targets)
        return {_key(name): _number(name, metric, outputs, targets) for name, metric in self.metrics.items()}


def _key(name: str) -> str:
    return name if name.startswith("test_") else f"test_{name}"


def _number(name: str, metric: Metric, outputs: Tensor, targets: Tensor) -> float:
    try:
        value: Any = metric(outputs, targets)
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise InputError(
            f"metrics[{name!r}] can't be applied to outputs of shape {tuple(outputs.shape)} and targets of shape "
            f"{tuple(targets.shape)}: {first}"
        ) from error
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(
            f"metrics[{name!r}] returned a {type(value).__name__}; it must return one number for the whole test set."
        ) from None


def check_metrics(metrics: Any) -> None:
    """Raises `InputError` where own metrics are not functions by name."""
    if metrics is None:
        return
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) and name for name in metrics):
        raise InputError(
            f"metrics is a {type(metrics).__name__}; it must be a dict such as "
            "{'bias': lambda outputs, targets: float((outputs - targets).mean())}."
        )
    if "loss" in metrics or "test_loss" in metrics:
        raise InputError(
            "metrics has a 'loss', but test_loss is the loss that the run trains with; give it another name."
        )
    for name, metric in metrics.items():
        if not callable(metric) or isinstance(metric, type):
            raise InputError(f"metrics[{name!r}] is {metric!r}; it must be a function (outputs, targets) → number.")


def measures(reading: Reading, outputs: Any, targets: Tensor) -> list[Measure]:
    """What is defined for outputs of this shape and these targets, of which all are given, as the loss reads them."""
    if not isinstance(outputs, Tensor) or targets.numel() == 0:
        return []
    some = targets[: len(outputs)]
    classes = class_dimension(outputs, some, second=reading.second)
    if reading.kind in ("classes", "unknown") and classes is not None and outputs.shape[classes] > 1:
        return _of_classes(reading, outputs, targets, outputs.shape[classes])
    if not same_but_ones(outputs, some):
        return []
    zero_one = bool(((targets == 0) | (targets == 1)).all())
    single = targets.numel() == len(targets)
    match reading.kind:
        case "binary" if zero_one and single:
            return [BinaryAccuracy(reading.threshold), *_auc(targets, _itself)]
        case "binary" if zero_one:
            return [LabelAccuracy(reading.threshold)]
        case "numbers":
            return [Errors(targets, reading.log)]
        # Whether the outputs of a function of the caller's own are logits or probabilities is not known; their order is.
        case "unknown" if zero_one:
            return _auc(targets, _itself) if single else []
        case "unknown" if targets.is_floating_point():
            return [Errors(targets, log=False)]
    return []


def _of_classes(reading: Reading, outputs: Tensor, targets: Tensor, classes: int) -> list[Measure]:
    labels = targets[targets != reading.ignored]
    if targets.is_floating_point() or labels.numel() == 0 or int(labels.min()) < 0 or int(labels.max()) >= classes:
        return []
    two = classes == 2 and targets.dim() == 1 and len(labels) == len(targets)
    return [Accuracy(reading), *(_auc(targets, lambda o: o[:, 1] - o[:, 0]) if two else [])]


def _auc(targets: Tensor, score: Callable[[Tensor], Tensor]) -> list[Measure]:
    """Needs examples of both classes."""
    return [Auc(score)] if bool((targets > 0.5).any()) and bool((targets < 0.5).any()) else []


def _itself(outputs: Tensor) -> Tensor:
    return outputs
