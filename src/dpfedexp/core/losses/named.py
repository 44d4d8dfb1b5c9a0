"""Losses by name, one number per example, so that a client's mean is over its own examples and padding can weigh nothing."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from dpfedexp.core.losses.shapes import IGNORED, aligned, over_counted, per_example, with_classes_second
from dpfedexp.errors import InputError, nearest

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b] from logits [b, classes]; sequences [b, t, classes] with labels [b, t] give the mean over their positions.

    Positions with torch's label −100 do not count. Targets may be probabilities of the logits' shape.
    """
    outputs, targets = with_classes_second("cross-entropy", outputs, targets)
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return _over_positions(losses, targets)


def negative_log_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b] from log-probabilities, such as those of nn.LogSoftmax(1), in the shapes of `cross_entropy`."""
    outputs, targets = with_classes_second("nll", outputs, targets)
    losses = F.nll_loss(outputs, targets, reduction="none")
    return _over_positions(losses, targets)


def _over_positions(losses: Tensor, targets: Tensor) -> Tensor:
    if losses.dim() == 1:
        return losses
    return per_example(losses) if targets.is_floating_point() else over_counted(losses, targets, IGNORED)


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖output − target‖²: the synthetic problem's f_i."""
    outputs, targets = aligned("half-squared-error", outputs, targets)
    squares = (outputs - targets).square()
    return 0.5 * squares.flatten(1).sum(1) if outputs.dim() > 1 else 0.5 * squares


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's outputs of (output − target)²: torch's, not halved."""
    outputs, targets = aligned("mse", outputs, targets)
    return per_example((outputs - targets).square())


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's outputs of |output − target|."""
    outputs, targets = aligned("mae", outputs, targets)
    return per_example((outputs - targets).abs())


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """½(output − target)² up to a distance of 1 and |output − target| − ½ beyond, which is smooth-L1 too."""
    outputs, targets = aligned("huber", outputs, targets)
    return per_example(F.huber_loss(outputs, targets, reduction="none"))


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """[b] from logits, one for every 0/1 target; several labels of an example give their mean."""
    outputs, targets = aligned("binary-cross-entropy", outputs, targets)
    return per_example(F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none"))


def poisson(outputs: Tensor, targets: Tensor) -> Tensor:
    """exp(output) − target · output, for counts whose expected value is exp(output)."""
    outputs, targets = aligned("poisson", outputs, targets)
    return per_example(F.poisson_nll_loss(outputs, targets, reduction="none"))


LOSSES: dict[str, Loss] = {
    "cross-entropy": cross_entropy,
    "nll": negative_log_likelihood,
    "binary-cross-entropy": binary_cross_entropy,
    "half-squared-error": half_squared_error,
    "mse": mean_squared_error,
    "mae": mean_absolute_error,
    "huber": huber,
    "poisson": poisson,
}
ALIASES = {
    "ce": "cross-entropy",
    "crossentropy": "cross-entropy",
    "categorical-cross-entropy": "cross-entropy",
    "nll-loss": "nll",
    "bce": "binary-cross-entropy",
    "bce-with-logits": "binary-cross-entropy",
    "binary-cross-entropy-with-logits": "binary-cross-entropy",
    "mean-squared-error": "mse",
    "mse-loss": "mse",
    "l1": "mae",
    "l1-loss": "mae",
    "mean-absolute-error": "mae",
    "huber-loss": "huber",
    "smooth-l1": "huber",
    "smooth-l1-loss": "huber",
    "poisson-nll": "poisson",
}
"""Other names of the same losses. A name may be written with capitals, underscores or spaces too."""


def by_name(name: str) -> Loss:
    """The loss of a name or of another name of it; raises `InputError` with the nearest or with all of them."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    plain = ALIASES.get(plain, plain)
    if plain not in LOSSES:
        raise InputError(f"loss is {name!r}, which does not exist.{nearest(plain, [*LOSSES, *ALIASES])}")
    return LOSSES[plain]
