"""Losses per example, so that a client's mean is over its own examples and padding can weigh nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfedexp.errors import InputError, nearest

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b] from logits [b, classes]; sequences [b, t, classes] with targets [b, t] give the mean over their positions."""
    if outputs.dim() == targets.dim() + 1 and outputs.dim() > 2:
        return F.cross_entropy(outputs.movedim(-1, 1), targets, reduction="none").flatten(1).mean(1)
    return F.cross_entropy(outputs, targets, reduction="none")


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖output − target‖²: the synthetic problem's f_i."""
    return (
        0.5 * (outputs - targets).square().flatten(1).sum(1)
        if outputs.dim() > 1
        else 0.5 * (outputs - targets).square()
    )


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b] from logits of the same shape as the 0/1 targets."""
    losses = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
    return losses.flatten(1).mean(1) if losses.dim() > 1 else losses


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "half-squared-error": half_squared_error,
    "binary-cross-entropy": binary_cross_entropy,
}


def resolve(loss: str | Loss | None, targets: Tensor) -> Loss:
    """The loss by name, a callable as it is, or the usual one for the targets' type."""
    if loss is None:
        return half_squared_error if targets.is_floating_point() else cross_entropy
    if isinstance(loss, str):
        if loss not in LOSSES:
            raise InputError(f"loss is {loss!r}, which does not exist.{nearest(loss, LOSSES)}")
        return LOSSES[loss]
    return loss


def check_per_example(losses: Tensor, batch: int) -> None:
    if tuple(losses.shape) != (batch,):
        raise InputError(
            f"the loss returned shape {tuple(losses.shape)} for a batch of {batch}; it must return one number per example, "
            "for example with reduction='none'."
        )
    if not losses.is_floating_point() or losses.dtype == torch.float16:
        raise InputError(f"the loss returned {losses.dtype}; it must return float32 or float64.")
