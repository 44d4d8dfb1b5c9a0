"""Outputs and targets of the same examples brought to one shape, where there is only one way; refused where there is none.

Nothing here broadcasts: outputs (b, 1) minus targets (b,) would be b² numbers, every output against every target.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpfedexp.errors import InputError
from dpfedexp.inputs import shape_of

IGNORED = -100
"""The label that torch leaves out unless it is told another."""


def compared(outputs: Any) -> Tensor:
    """What a loss compares with targets: the outputs, or of several parts the one named logits, as in models of `transformers`."""
    if isinstance(outputs, Tensor):
        return outputs
    part = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if outputs is None:
        raise InputError("the model returns None; end its forward with `return`.")
    if not isinstance(part, Tensor):
        raise InputError(
            f"the model returns {shape_of(outputs)}, and this loss compares one tensor, or a part named 'logits', with the "
            "targets; give loss a function (outputs, targets) that takes the part it needs and returns one loss per example."
        )
    return part


def aligned(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs in the targets' shape, where the two differ by dimensions of size 1 only, and targets in the outputs' type."""
    outputs = compared(outputs)
    if outputs.shape != targets.shape:
        if not same_but_ones(outputs, targets):
            classes = targets.ndim == 1 and targets.is_floating_point()
            raise InputError(
                f"{name} needs one output for every target: the model returns {shape(outputs)} and the targets are "
                f"{shape(targets)}; give the last layer as many outputs as an example has targets"
                + (", or, if the targets are classes, make them whole numbers (int64)." if classes else ".")
            )
        outputs = outputs.reshape(targets.shape)
    return outputs, targets if targets.is_floating_point() else targets.to(outputs.dtype)


def same_but_ones(outputs: Tensor, targets: Tensor) -> bool:
    """Whether the shapes are the same but for dimensions of size 1 after the first; `squeeze` leaves a single row none at all."""
    one, other = outputs.shape or (1,), targets.shape or (1,)
    return one[0] == other[0] and [n for n in one[1:] if n != 1] == [n for n in other[1:] if n != 1]


def class_dimension(outputs: Tensor, targets: Tensor, *, second: bool = False) -> int | None:
    """Where the classes are: last as in [b, t, classes] with labels [b, t], or second as torch has them; None where nowhere.

    Args:
        outputs: one number per class.
        targets: labels.
        second: which it is where both fit.
    """
    if outputs.dim() != targets.dim() + 1 or targets.dim() == 0:
        return None
    fits = {-1: outputs.shape[:-1] == targets.shape, 1: outputs.shape[:1] + outputs.shape[2:] == targets.shape}
    return next((at for at in ((1, -1) if second else (-1, 1)) if fits[at]), None)


def with_classes_second(name: str, outputs: Tensor, targets: Tensor, *, second: bool = False) -> tuple[Tensor, Tensor]:
    """Outputs as torch wants them, [b, classes, …], and labels [b, …], or probabilities in the outputs' shape."""
    outputs = compared(outputs)
    at = class_dimension(outputs, targets, second=second)
    if targets.is_floating_point():
        if outputs.shape == targets.shape and outputs.dim() > 1:
            return (outputs, targets) if second else (outputs.movedim(-1, 1), targets.movedim(-1, 1))
        raise InputError(
            f"{name} needs class labels, and the targets are real numbers of shape {shape(targets)}; give whole numbers from 0, or "
            "choose loss='mse' for regression."
        )
    if at is None:
        raise InputError(
            f"{name} needs one output per class: the model returns {shape(outputs)} and the labels are {shape(targets)}; "
            f"{_remedy(outputs, targets)}."
        )
    return outputs.movedim(at, 1), targets


def _remedy(outputs: Tensor, targets: Tensor) -> str:
    if outputs.dim() == 2 and tuple(targets.shape) == (len(outputs), 1):
        return "give the labels as (n,), for example with labels.squeeze(1)"
    if same_but_ones(outputs, targets):
        return "for one output per label choose loss='bce' (0/1 labels) or loss='mse' (numbers)"
    return "labels (b, …) need outputs (b, …, classes)"


def per_example(losses: Tensor) -> Tensor:
    """[b] from [b, …]: the mean over what an example has."""
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


def over_counted(losses: Tensor, labels: Tensor, ignored: int) -> Tensor:
    """[b] from [b, …]: the mean over the positions whose label counts, 0 where none does.

    Where all count the factor is exactly 1, so that the mean stays what it is without this, bit for bit.
    """
    counted = (labels != ignored).flatten(1).sum(1).clamp_min(1)
    return losses.flatten(1).mean(1) * (math.prod(labels.shape[1:]) / counted)


def shape(value: Any) -> str:
    """A tensor's shape with b for its number of rows, as the other sentences write it; otherwise the kind of thing."""
    if not isinstance(value, Tensor):
        return shape_of(value)
    return "(" + ", ".join(["b", *map(str, value.shape[1:])]) + (",)" if value.dim() == 1 else ")")
