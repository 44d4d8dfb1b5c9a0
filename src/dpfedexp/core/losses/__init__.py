"""Losses per example: by name, torch's own, or the caller's function (docs/losses.md)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dpfedexp.core.losses.check import check_labels, check_loss, check_per_example, doubt_of
from dpfedexp.core.losses.from_torch import TorchLoss, from_torch
from dpfedexp.core.losses.named import (
    ALIASES,
    LOSSES,
    Loss,
    binary_cross_entropy,
    by_name,
    cross_entropy,
    half_squared_error,
    huber,
    mean_absolute_error,
    mean_squared_error,
    negative_log_likelihood,
    poisson,
)
from dpfedexp.core.losses.reading import Reading, read, reading_of
from dpfedexp.errors import InputError

__all__ = [
    "ALIASES",
    "LOSSES",
    "Loss",
    "Reading",
    "binary_cross_entropy",
    "by_name",
    "check_labels",
    "check_loss",
    "check_per_example",
    "cross_entropy",
    "doubt_of",
    "half_squared_error",
    "huber",
    "mean_absolute_error",
    "mean_squared_error",
    "negative_log_likelihood",
    "plain",
    "poisson",
    "read",
    "reading_of",
    "resolve",
]


def resolve(loss: str | Loss | None, targets: Any) -> Loss:
    """The loss by name, one of torch's per example, a callable as it is, or the usual one for the targets' type."""
    if loss is None:
        return half_squared_error if isinstance(targets, Tensor) and targets.is_floating_point() else cross_entropy
    if isinstance(loss, str):
        return by_name(loss)
    if isinstance(loss, type):
        raise InputError(f"loss is the class {loss.__name__}; give one of it, {loss.__name__}().")
    if not callable(loss):
        raise InputError(
            f"loss is {loss!r}; it must be a name such as 'mse', a loss of torch, or a function (outputs, targets)."
        )
    return from_torch(loss) or loss


def plain(loss: Loss) -> Loss:
    """The named loss that computes the same for one label or number per example, where there is one; otherwise the loss itself."""
    return loss.plain or loss if isinstance(loss, TorchLoss) else loss
