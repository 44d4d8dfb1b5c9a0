"""torch's own losses, modules and functions, as losses per example.

A loss of torch reduces a batch to one number. Here it is asked for all of them (`reduction="none"`). What an example has several of
is averaged, or added up where the loss was made with reduction="sum" or "batchmean". Two things differ from torch's mean over a
batch, because a mean over examples can't divide by what the other examples hold. Class weights multiply an example's loss, and are
not divided by again. An example whose only label is `ignore_index` has the loss 0 and counts; within a sequence such positions do
not count.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfedexp.core.losses.named import (
    Loss,
    binary_cross_entropy,
    cross_entropy,
    mean_absolute_error,
    mean_squared_error,
)
from dpfedexp.core.losses.reading import Reading
from dpfedexp.core.losses.shapes import IGNORED, aligned, compared, over_counted, with_classes_second
from dpfedexp.errors import InputError

FUNCTIONS: dict[Callable[..., Any], type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}
_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_BINARY = (nn.BCEWithLogitsLoss, nn.BCELoss, nn.MultiLabelSoftMarginLoss)
_NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss)
_OTHER = (nn.KLDivLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss, nn.MultiLabelMarginLoss)
_ONE_BY_ONE = (*_BINARY, *_NUMBERS, nn.KLDivLoss, nn.SoftMarginLoss)
_MORE_INPUTS = (
    nn.GaussianNLLLoss,
    nn.CTCLoss,
    nn.CosineEmbeddingLoss,
    nn.MarginRankingLoss,
    nn.TripletMarginLoss,
    nn.TripletMarginWithDistanceLoss,
)
_PLAIN: dict[str, Loss] = {
    "CrossEntropyLoss": cross_entropy,
    "BCEWithLogitsLoss": binary_cross_entropy,
    "MSELoss": mean_squared_error,
    "L1Loss": mean_absolute_error,
}


class TorchLoss:
    """One loss per example by a loss of torch; the module that was given is copied and stays as it is.

    Attributes:
        reading: how it reads outputs.
        plain: the named loss that computes the same for one label or number per example, None where options make it another.
    """

    def __init__(self, module: nn.Module) -> None:
        if isinstance(module, _MORE_INPUTS):
            raise InputError(
                f"loss is a {type(module).__name__}, which takes more than outputs and targets; give a function (outputs, targets) "
                "that takes them apart and returns one loss per example."
            )
        reduction = module.reduction
        self.module = copy.deepcopy(module)
        self.module.reduction = "none"  # type: ignore[assignment]
        self.added = reduction in ("sum", "batchmean")
        self.reading = _reading(module)
        options = _options(module) | ({"reduction": reduction} if self.added else {})
        self.name = type(module).__name__
        # By this name the settings of a run know the loss, so that a run with other options does not go on from its checkpoint.
        self.__qualname__ = self.name + (f"({', '.join(f'{k}={v}' for k, v in options.items())})" if options else "")
        self.plain = _PLAIN.get(self.__qualname__)
        self._placed: dict[torch.device, nn.Module] = {}

    def __repr__(self) -> str:
        return self.__qualname__

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = compared(outputs)
        module, reading = self._on(outputs.device), self.reading
        if isinstance(module, _CLASSES):
            outputs, targets = with_classes_second(self.name, outputs, targets, second=True)
        elif isinstance(module, _ONE_BY_ONE):
            outputs, targets = aligned(self.name, outputs, targets)
        losses: Tensor = module(outputs, targets)
        if losses.dim() < 2:
            return losses
        if self.added:
            return losses.flatten(1).sum(1)
        if reading.kind == "classes" and not targets.is_floating_point():
            return over_counted(losses, targets, reading.ignored)
        return losses.flatten(1).mean(1)

    def _on(self, device: torch.device) -> nn.Module:
        """The module with its weights where the outputs are."""
        if device not in self._placed:
            self._placed[device] = copy.deepcopy(self.module).to(device)
        return self._placed[device]


def from_torch(loss: Any) -> TorchLoss | None:
    """A module with a `reduction`, a function of torch.nn.functional, or a `functools.partial` of one; None for anything else."""
    if isinstance(loss, nn.Module):
        return TorchLoss(loss) if hasattr(loss, "reduction") else None
    function, options = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    if (
        not isinstance(function, Hashable)
        or function not in FUNCTIONS
        or (isinstance(loss, functools.partial) and loss.args)
    ):
        return None
    return TorchLoss(_module(FUNCTIONS[function], options))


def _module(kind: type[nn.Module], options: Mapping[str, Any]) -> nn.Module:
    try:
        return kind(**options)
    except TypeError as error:
        raise InputError(f"loss has options that {kind.__name__} does not take: {error}.") from None


def _reading(module: nn.Module) -> Reading:
    if isinstance(module, (*_CLASSES, nn.MultiMarginLoss)):
        ignored: Any = getattr(module, "ignore_index", IGNORED)
        logs = isinstance(module, nn.NLLLoss)
        return Reading("classes", ignored=int(ignored), second=True, log_probabilities=logs)
    if isinstance(module, _BINARY):
        return Reading("binary", threshold=0.5 if isinstance(module, nn.BCELoss) else 0.0)
    if isinstance(module, _NUMBERS):
        return Reading("numbers", log=bool(getattr(module, "log_input", False)))
    return Reading("other") if isinstance(module, _OTHER) else Reading()


def _options(module: nn.Module) -> dict[str, str]:
    """What the module was made with that is not torch's default, as text."""
    found = {}
    for name, parameter in inspect.signature(type(module)).parameters.items():
        value = getattr(module, name, parameter.default)
        if name in ("size_average", "reduce", "reduction") or value is parameter.default:
            continue
        if isinstance(value, Tensor):
            numbers = value.detach().cpu()
            few = numbers.numel() <= 16
            found[name] = str(numbers.tolist()) if few else hashlib.sha256(numbers.numpy().tobytes()).hexdigest()[:16]
        elif value != parameter.default:
            found[name] = str(value)
    return found
