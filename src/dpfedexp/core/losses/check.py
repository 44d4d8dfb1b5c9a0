"""A loss tried on a few rows before the first round: what does not fit is one sentence with the remedy, not a wrong number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dpfedexp.core.losses.named import Loss
from dpfedexp.core.losses.reading import Reading, read, reading_of
from dpfedexp.core.losses.shapes import class_dimension, same_but_ones, shape
from dpfedexp.errors import InputError

_CLOSE = 1e-4
"""Losses that differ by less are the same, computed in another order."""
_ROWS = 65536
"""Rows of targets looked at together, so that the look needs no memory in proportion to the data."""


def check_loss(loss: Loss, outputs: Any, targets: Any) -> None:
    """Raises `InputError` where the loss does not give one right number for each of these rows, of which there are at least two."""
    outputs, targets = _without_coincidence(read(loss, outputs), targets)
    both = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    if both:
        _check_classes(reading_of(loss), outputs, targets)
    try:
        losses = loss(outputs, targets)
    except InputError:
        raise
    except Exception as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        kind = f" ({targets.dtype})" if isinstance(targets, Tensor) else ""
        remedy = f"; {_remedy(outputs, targets)}" if both and outputs.shape != targets.shape else ""
        raise InputError(
            f"the loss can't be applied to outputs of shape {shape(outputs)} and targets of shape {shape(targets)}{kind}: "
            f"{first.removesuffix('.')}{remedy}."
        ) from error
    _check_tensor(losses)
    mixed = (
        both and outputs.shape != targets.shape and same_but_ones(outputs, targets) and _mixes(loss, outputs, targets)
    )
    if mixed:
        raise InputError(
            f"the loss mixes examples: outputs of shape {shape(outputs)} and targets of shape {shape(targets)} broadcast, "
            f"every output against every target; {_remedy(outputs, targets)}."
        )
    check_per_example(losses, len(targets))


def doubt_of(loss: Loss, outputs: Any) -> str | None:
    """A sentence where the outputs are almost surely not what the loss takes them for, though nothing fails.

    Args:
        loss: which loss.
        outputs: of a few rows, with the operations that made them.
    """
    outputs, reading = read(loss, outputs), reading_of(loss)
    if not isinstance(outputs, Tensor):
        return None
    last = _last_operation(outputs)
    if reading.kind == "binary" and reading.threshold == 0.0 and last == "Sigmoid":
        return (
            "the model ends with a sigmoid, and the loss applies one itself, to logits: leave the model's out, or choose "
            "loss=nn.BCELoss()."
        )
    if reading.kind == "classes" and last == "Softmax":
        return "the model ends with a softmax, and the loss takes logits: leave the softmax out."
    if reading.log_probabilities and bool((outputs > 0).any()):
        return (
            "the loss takes log-probabilities, and the model's outputs are above 0: end the model with nn.LogSoftmax(dim=-1), or "
            "choose loss='cross-entropy', which takes logits."
        )
    return None


_SHAPING = ("View", "Squeeze", "Unsqueeze", "Reshape", "Transpose", "Permute", "Select", "Alias", "UnsafeView")


def _last_operation(outputs: Tensor) -> str:
    """What made the numbers, such as "Sigmoid"; operations that only change their shape do not count."""
    step = outputs.grad_fn
    while step is not None:
        name = step.name().partition("Backward")[0]
        if name not in _SHAPING:
            return name
        step = step.next_functions[0][0] if step.next_functions else None
    return ""


def check_per_example(losses: Tensor, batch: int) -> None:
    _check_tensor(losses)
    if tuple(losses.shape) != (batch,):
        several = losses.dim() > 1 and len(losses) == batch
        remedy = "with losses.flatten(1).mean(1)" if several else "with reduction='none'"
        raise InputError(
            f"the loss returned shape {tuple(losses.shape)} for a batch of {batch}; it must return one number per example, "
            f"for example {remedy}."
        )
    if not losses.is_floating_point() or losses.dtype == torch.float16:
        raise InputError(f"the loss returned {losses.dtype}; it must return float32 or float64.")


def _check_tensor(losses: Any) -> None:
    if not isinstance(losses, Tensor):
        raise InputError(
            f"the loss returned a {type(losses).__name__}; it must return a tensor, one number per example."
        )


def check_labels(field: str, loss: Loss, outputs: Any, targets: Any) -> None:
    """Raises `InputError` where a label has no output, or a 0/1 target is neither 0 nor 1 nor between them.

    Args:
        field: whose the targets are, for the sentence.
        loss: the loss, which says what targets are.
        outputs: of a few rows, for the number of classes.
        targets: all of them.
    """
    outputs, reading = read(loss, outputs), reading_of(loss)
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.numel() == 0:
        return
    if reading.kind == "binary":
        least, most = (float(value) for value in _range(targets))
        if least < 0 or most > 1:
            raise InputError(
                f"{field} are from {least:g} to {most:g}, and the loss needs 0 and 1; for labels −1 and 1 give "
                "(targets + 1) / 2, for more than two classes choose loss='cross-entropy'."
            )
    if reading.kind == "classes" and not targets.is_floating_point():
        at = class_dimension(outputs, targets[: len(outputs)], second=reading.second)
        if at is None:
            return
        low, high = (int(value) for value in _range(targets, reading.ignored))
        classes = outputs.shape[at]
        if low < 0 or high >= classes:
            raise InputError(
                f"{field} hold labels from {low} to {high}, and the model has {classes} outputs; labels must be from 0 to "
                f"{classes - 1}: number them from 0, or give the last layer {high - min(low, 0) + 1} outputs."
            )


def _range(targets: Tensor, ignored: int | None = None) -> tuple[float, float]:
    """The least and the most, without a copy of the targets; 0 and 0 where all are ignored."""
    found = []
    for part in targets.flatten(1).split(_ROWS) if targets.dim() > 1 else targets.split(_ROWS):
        kept = part if ignored is None else part[part != ignored]
        if kept.numel():
            found += [kept.min().item(), kept.max().item()]
    return min(found, default=0), max(found, default=0)


def _check_classes(reading: Reading, outputs: Tensor, targets: Tensor) -> None:
    at = class_dimension(outputs, targets, second=reading.second)
    if reading.kind == "classes" and not targets.is_floating_point() and at is not None and outputs.shape[at] == 1:
        raise InputError(
            f"the model has one output for each label ({shape(outputs)}), and a cross-entropy over one class is always 0; choose "
            "loss='bce' for 0/1 labels, loss='mse' for numbers, or give the last layer one output per class."
        )


def _without_coincidence(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """As many rows as no other dimension has: (2, 2) minus (2,) broadcasts where (3, 2) minus (3,) fails."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.dim() == 0:
        return outputs, targets
    taken = {*outputs.shape[1:], *targets.shape[1:]}
    if len(outputs) != len(targets) or len(targets) not in taken:
        return outputs, targets
    rows = next(n for n in range(2, 100) if n not in taken)
    at = torch.arange(rows, device=targets.device) % len(targets)
    return outputs[at], targets[at]


def _mixes(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether an example's loss depends on the other rows. Rows that differ are made up, since those tried may be alike."""
    generator = torch.Generator().manual_seed(0)

    def between(like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=generator).to(like.dtype)

    # On the CPU: a made-up label that the loss does not know is an error there, and the end of the process on a GPU.
    labels = (torch.arange(targets.numel()) % 2).reshape(targets.shape).to(targets.dtype)
    made_up = between(outputs), between(targets) if targets.is_floating_point() else labels
    for o, t in (made_up, (outputs, targets)):
        try:
            together = loss(o, t)
        except Exception:
            continue
        try:
            alone = torch.cat([loss(o[n : n + 1], t[n : n + 1]).reshape(1) for n in range(len(t))])
        except Exception:
            return True
        return together.shape != alone.shape or not torch.allclose(together, alone, rtol=_CLOSE, atol=_CLOSE)
    return False


def _remedy(outputs: Tensor, targets: Tensor) -> str:
    if not same_but_ones(outputs, targets):
        return "give the last layer the outputs that this loss compares with these targets"
    if targets.dim() == 1:
        return "end the model with nn.Flatten(0), or give targets of shape (n, 1)"
    return f"give the targets the outputs' shape, {shape(outputs)}, for example with targets.reshape"
