"""How a loss reads a model's outputs, which decides what else can be measured of them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal

from dpfedexp.core.losses.named import (
    Loss,
    binary_cross_entropy,
    cross_entropy,
    half_squared_error,
    huber,
    mean_absolute_error,
    mean_squared_error,
    negative_log_likelihood,
    poisson,
)
from dpfedexp.core.losses.shapes import IGNORED, compared


@dataclass(frozen=True)
class Reading:
    """What the outputs and targets of a loss are.

    Attributes:
        kind: "classes" by labels, "binary" for 0/1 targets, "numbers", "unknown" for a function of the caller's own, "other" where
            the loss is known and nothing else is defined.
        threshold: above which an output says 1.
        log: whether outputs are logarithms of the expected numbers.
        ignored: the label that does not count.
        second: whether classes are the second dimension where last would fit too.
        log_probabilities: whether the outputs of classes are log-probabilities, and not logits.
    """

    kind: Literal["classes", "binary", "numbers", "unknown", "other"] = "unknown"
    threshold: float = 0.0
    log: bool = False
    ignored: int = IGNORED
    second: bool = False
    log_probabilities: bool = False


_CLASSES, _BINARY, _NUMBERS = Reading("classes"), Reading("binary"), Reading("numbers")
_READINGS: dict[Loss, Reading] = {
    cross_entropy: _CLASSES,
    negative_log_likelihood: Reading("classes", log_probabilities=True),
    binary_cross_entropy: _BINARY,
    half_squared_error: _NUMBERS,
    mean_squared_error: _NUMBERS,
    mean_absolute_error: _NUMBERS,
    huber: _NUMBERS,
    poisson: Reading("numbers", log=True),
}


def reading_of(loss: Loss) -> Reading:
    """A named loss's, or that which the loss carries itself."""
    own = getattr(loss, "reading", None)
    if isinstance(own, Reading):
        return own
    return _READINGS.get(loss, Reading()) if isinstance(loss, Hashable) else Reading()


def read(loss: Loss, outputs: Any) -> Any:
    """What the loss looks at of a model's outputs; a function of the caller's own gets all of them."""
    return outputs if reading_of(loss).kind == "unknown" else compared(outputs)
