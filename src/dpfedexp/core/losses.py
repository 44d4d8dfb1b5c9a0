"""Losses per example (by name, from torch, or a function), and checks of them before the first round.

A loss gives one number per example, so that a client's mean is over its own examples and padding has weight 0. Shapes never
broadcast. docs/losses.md describes the difference to torch's mean over a batch.
"""

import copy
import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfedexp.core.modules import shape_of
from dpfedexp.errors import InputError, first_line, nearest, require

Loss = Callable[[Tensor, Tensor], Tensor]
IGNORED = -100
"""The label that torch ignores by default."""


def resolve(loss: str | Loss | None, targets: Any) -> Loss:
    """Return the loss: by name, from torch as one number per example, a callable as it is, or the default for the targets' type."""
    if loss is None:
        return half_squared_error if isinstance(targets, Tensor) and targets.is_floating_point() else cross_entropy
    if isinstance(loss, str):
        return by_name(loss)
    if isinstance(loss, type):
        raise InputError(f"loss is the class {loss.__name__}; pass an instance, {loss.__name__}().")
    require(callable(loss), f"loss is {loss!r}; give a name such as 'mse', a loss of torch, or a function.")
    return from_torch(loss) or loss


def plain(loss: Loss) -> Loss:
    """Return the named loss that computes the same for one label or number per example, if there is one; otherwise `loss`."""
    return loss.plain or loss if isinstance(loss, TorchLoss) else loss


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy per example, [b], from logits [b, classes]; the mean over positions for sequences [b, t, classes].

    Sequences have labels [b, t]; torch's label −100 is ignored. Targets may be probabilities of the logits' shape.
    """
    outputs, targets = with_classes_second("cross-entropy", outputs, targets)
    return per_example(F.cross_entropy(outputs, targets, reduction="none"), targets)


def negative_log_likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood per example, [b], from log-probabilities (nn.LogSoftmax), in the shapes of `cross_entropy`."""
    outputs, targets = with_classes_second("nll", outputs, targets)
    return per_example(F.nll_loss(outputs, targets, reduction="none"), targets)


def half_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """½‖output − target‖² per example: f_i of the synthetic problem."""
    outputs, targets = match_shapes("half-squared-error", outputs, targets)
    squares = (outputs - targets).square()
    return 0.5 * squares.flatten(1).sum(1) if outputs.dim() > 1 else 0.5 * squares


def mean_squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's outputs of (output − target)²: as in torch, not halved."""
    outputs, targets = match_shapes("mse", outputs, targets)
    return per_example((outputs - targets).square())


def mean_absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over an example's outputs of |output − target|."""
    outputs, targets = match_shapes("mae", outputs, targets)
    return per_example((outputs - targets).abs())


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    """½(output − target)² up to a distance of 1 and |output − target| − ½ beyond; the same as smooth L1."""
    outputs, targets = match_shapes("huber", outputs, targets)
    return per_example(F.huber_loss(outputs, targets, reduction="none"))


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy per example, [b], from one logit for every 0/1 target; the mean over an example's labels."""
    outputs, targets = match_shapes("binary-cross-entropy", outputs, targets)
    return per_example(F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none"))


def poisson(outputs: Tensor, targets: Tensor) -> Tensor:
    """exp(output) − target · output, for counts whose expected value is exp(output)."""
    outputs, targets = match_shapes("poisson", outputs, targets)
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
    **dict.fromkeys(("ce", "crossentropy", "categorical-cross-entropy"), "cross-entropy"),
    **dict.fromkeys(("bce", "bce-with-logits", "binary-cross-entropy-with-logits"), "binary-cross-entropy"),
    **dict.fromkeys(("mean-squared-error", "mse-loss"), "mse"),
    **dict.fromkeys(("l1", "l1-loss", "mean-absolute-error"), "mae"),
    **dict.fromkeys(("huber-loss", "smooth-l1", "smooth-l1-loss"), "huber"),
    **{"nll-loss": "nll", "poisson-nll": "poisson"},
}
"""Other names of the same losses. Names may also be written with capitals, underscores or spaces."""


def by_name(name: str) -> Loss:
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    plain = ALIASES.get(plain, plain)
    require(plain in LOSSES, f"loss is {name!r}, which does not exist.{nearest(plain, [*LOSSES, *ALIASES])}")
    return LOSSES[plain]


def output_tensor(outputs: Any) -> Tensor:
    """Return the tensor that a loss compares with targets: the outputs, or their part named logits, as in `transformers`."""
    if isinstance(outputs, Tensor):
        return outputs
    part = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    require(outputs is not None, "the model returns None; its forward must return the outputs.")
    if not isinstance(part, Tensor):
        raise InputError(
            f"the model returns {shape_of(outputs)}, and this loss compares one tensor, or a part named 'logits', with the "
            "targets; give loss a function (outputs, targets) that takes the part it needs and returns one loss per example."
        )
    return part


def match_shapes(name: str, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return outputs in the targets' shape, which may differ by dimensions of size 1, and whole-number targets in their type."""
    outputs = output_tensor(outputs)
    if outputs.shape != targets.shape:
        if not same_but_singletons(outputs, targets):
            shapes = f"the model returns {shape(outputs)} and the targets are {shape(targets)}"
            remedy = "give the last layer as many outputs as an example has targets"
            if targets.is_floating_point() and targets.shape[1:].numel() == 1:
                remedy += ", or, if the targets are classes, make them whole numbers, one for each row (int64)"
            raise InputError(f"{name} needs one output for every target: {shapes}; {remedy}.")
        outputs = outputs.reshape(targets.shape)
    return outputs, targets if targets.is_floating_point() else targets.to(outputs.dtype)


def same_but_singletons(outputs: Tensor, targets: Tensor) -> bool:
    """Whether two shapes are equal but for dimensions of size 1 after the first; a squeezed single row may have no dimension."""
    one, other = outputs.shape or (1,), targets.shape or (1,)
    return one[0] == other[0] and [n for n in one[1:] if n != 1] == [n for n in other[1:] if n != 1]


def class_dimension(outputs: Tensor, targets: Tensor, *, second: bool = False) -> int | None:
    """The dimension of the classes: last, as in [b, t, classes] with labels [b, t], or second, as in torch; None if neither fits.

    With `second`, the second dimension is preferred where both fit.
    """
    if outputs.dim() != targets.dim() + 1 or targets.dim() == 0:
        return None
    fits = {-1: outputs.shape[:-1] == targets.shape, 1: outputs.shape[:1] + outputs.shape[2:] == targets.shape}
    return next((at for at in ((1, -1) if second else (-1, 1)) if fits[at]), None)


def with_classes_second(name: str, outputs: Tensor, targets: Tensor, *, second: bool = False) -> tuple[Tensor, Tensor]:
    """Return outputs as torch expects them, [b, classes, …], and labels [b, …], or probabilities in the outputs' shape."""
    outputs = output_tensor(outputs)
    at = class_dimension(outputs, targets, second=second)
    if targets.is_floating_point():
        if outputs.shape == targets.shape and outputs.dim() > 1:
            return (outputs, targets) if second else (outputs.movedim(-1, 1), targets.movedim(-1, 1))
        real = f"{name} needs class labels, and the targets are real numbers of shape {shape(targets)}"
        raise InputError(f"{real}; give whole numbers from 0, or choose loss='mse' for regression.")
    if at is None:
        remedy = "labels (b, …) need outputs (b, …, classes)"
        if outputs.dim() == 2 and tuple(targets.shape) == (len(outputs), 1):
            remedy = "give the labels as (n,), for example with labels.squeeze(1)"
        elif same_but_singletons(outputs, targets):
            remedy = "for one output per label choose loss='bce' (0/1 labels) or loss='mse' (numbers)"
        raise InputError(
            f"{name} needs one output per class: the model returns {shape(outputs)} and the labels are {shape(targets)}; {remedy}."
        )
    return outputs.movedim(at, 1), targets


def per_example(losses: Tensor, labels: Tensor | None = None, ignored: int = IGNORED) -> Tensor:
    """The mean loss of each example, [b] from [b, …]; with labels, over positions that are not `ignored`, and 0 if all are."""
    if losses.dim() < 2:
        return losses
    mean = losses.flatten(1).mean(1)
    if labels is None or labels.is_floating_point():
        return mean
    counted = (labels != ignored).flatten(1).sum(1).clamp_min(1)
    # Where no label is ignored the factor is exactly 1, so the mean is unchanged, bit for bit.
    return mean * (math.prod(labels.shape[1:]) / counted)


def shape(value: Any) -> str:
    """A tensor's shape as text, with b for its number of rows; of any other value `shape_of`."""
    if not isinstance(value, Tensor):
        return shape_of(value)
    return "(" + ", ".join(["b", *map(str, value.shape[1:])]) + (",)" if value.dim() == 1 else ")")


@dataclass(frozen=True)
class LossTraits:
    """The outputs and targets that a loss expects.

    Attributes:
        kind: "classes" by labels, "binary" for 0/1 targets, "numbers", or "unknown" for any other loss.
        threshold: the output above which the prediction is 1.
        log: whether outputs are logarithms of the expected numbers.
        ignored: the label that is ignored.
        second: whether classes are the second dimension where the last would fit too.
        log_probabilities: whether the outputs of classes are log-probabilities, and not logits.
    """

    kind: Literal["classes", "binary", "numbers", "unknown"] = "unknown"
    threshold: float = 0.0
    log: bool = False
    ignored: int = IGNORED
    second: bool = False
    log_probabilities: bool = False


_LOSS_TRAITS: dict[Loss, LossTraits] = {
    cross_entropy: LossTraits("classes"),
    negative_log_likelihood: LossTraits("classes", log_probabilities=True),
    binary_cross_entropy: LossTraits("binary"),
    poisson: LossTraits("numbers", log=True),
    **dict.fromkeys((half_squared_error, mean_squared_error, mean_absolute_error, huber), LossTraits("numbers")),
}


def loss_traits(loss: Loss) -> LossTraits:
    """The traits of a loss: its own `traits`, or from the table of named losses."""
    own = getattr(loss, "traits", None)
    if isinstance(own, LossTraits):
        return own
    return _LOSS_TRAITS.get(loss, LossTraits()) if isinstance(loss, Hashable) else LossTraits()


def read(loss: Loss, outputs: Any) -> Any:
    """Return the part of a model's outputs that the loss uses; a function of the caller gets all of them."""
    return outputs if loss_traits(loss).kind == "unknown" else output_tensor(outputs)


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
_ONE_BY_ONE = (*_BINARY, *_NUMBERS, nn.KLDivLoss, nn.SoftMarginLoss)
_TRIPLETS = (nn.TripletMarginLoss, nn.TripletMarginWithDistanceLoss)
_MORE_INPUTS = (nn.GaussianNLLLoss, nn.CTCLoss, nn.CosineEmbeddingLoss, nn.MarginRankingLoss, *_TRIPLETS)
_PLAIN: dict[str, Loss] = {
    "CrossEntropyLoss": cross_entropy,
    "BCEWithLogitsLoss": binary_cross_entropy,
    "MSELoss": mean_squared_error,
    "L1Loss": mean_absolute_error,
}


class TorchLoss:
    """A loss of torch that returns one loss per example; it works on a copy of the given module.

    Attributes:
        traits: the outputs and targets that the loss expects.
        plain: the named loss that computes the same for one label or number per example; None where options change the loss.
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
        self.traits = _traits_of(module)
        options = _options(module) | ({"reduction": reduction} if self.added else {})
        self.name = type(module).__name__
        # A run's settings identify the loss by this name, so that a run with other options can't resume from its checkpoint.
        self.__qualname__ = self.name + (f"({', '.join(f'{k}={v}' for k, v in options.items())})" if options else "")
        self.plain = _PLAIN.get(self.__qualname__)
        self._placed: dict[torch.device, nn.Module] = {}

    def __repr__(self) -> str:
        return self.__qualname__

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = output_tensor(outputs)
        module, traits = self._on(outputs.device), self.traits
        if isinstance(module, _CLASSES):
            outputs, targets = with_classes_second(self.name, outputs, targets, second=True)
        elif isinstance(module, _ONE_BY_ONE):
            outputs, targets = match_shapes(self.name, outputs, targets)
        losses: Tensor = module(outputs, targets)
        if self.added and losses.dim() > 1:
            return losses.flatten(1).sum(1)
        return per_example(losses, targets if traits.kind == "classes" else None, traits.ignored)

    def _on(self, device: torch.device) -> nn.Module:
        if device not in self._placed:
            self._placed[device] = copy.deepcopy(self.module).to(device)
        return self._placed[device]


def from_torch(loss: Any) -> TorchLoss | None:
    """Wrap a module with a `reduction`, a function of torch.nn.functional, or a `functools.partial` of one; None for others."""
    if isinstance(loss, nn.Module):
        return TorchLoss(loss) if hasattr(loss, "reduction") else None
    call = loss if isinstance(loss, functools.partial) else functools.partial(loss)
    kind = FUNCTIONS.get(call.func) if isinstance(call.func, Hashable) else None
    if kind is None or call.args:
        return None
    try:
        return TorchLoss(kind(**call.keywords))
    except TypeError as error:
        raise InputError(f"loss has options that {kind.__name__} does not take: {error}.") from None


def _traits_of(module: nn.Module) -> LossTraits:
    if isinstance(module, (*_CLASSES, nn.MultiMarginLoss)):
        ignored: Any = getattr(module, "ignore_index", IGNORED)
        logs = isinstance(module, nn.NLLLoss)
        return LossTraits("classes", ignored=int(ignored), second=True, log_probabilities=logs)
    if isinstance(module, _BINARY):
        return LossTraits("binary", threshold=0.5 if isinstance(module, nn.BCELoss) else 0.0)
    if isinstance(module, _NUMBERS):
        return LossTraits("numbers", log=bool(getattr(module, "log_input", False)))
    return LossTraits()


def _options(module: nn.Module) -> dict[str, str]:
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


_CLOSE = 1e-4
"""Losses that differ by less are equal up to rounding."""
_SHAPING = ("View", "Squeeze", "Unsqueeze", "Reshape", "Transpose", "Permute", "Select", "Alias", "UnsafeView")
_ROWS = 65536
"""How many rows of targets are checked at a time, so that memory does not grow with the data."""


def check_loss(loss: Loss, outputs: Any, targets: Any) -> None:
    """Raise `InputError` unless the loss gives one valid number for each of these rows, of which there must be at least two."""
    outputs, targets = _without_coincidence(read(loss, outputs), targets)
    both = isinstance(outputs, Tensor) and isinstance(targets, Tensor)
    traits = loss_traits(loss)
    if both and traits.kind == "classes" and not targets.is_floating_point():
        at = class_dimension(outputs, targets, second=traits.second)
        if at is not None and outputs.shape[at] == 1:
            raise InputError(
                f"the model has one output for each label ({shape(outputs)}), and a cross-entropy over one class is always 0; "
                "choose loss='bce' for 0/1 labels, loss='mse' for numbers, or give the last layer one output per class."
            )
    try:
        losses = loss(outputs, targets)
    except InputError:
        raise
    except Exception as error:
        kind = f" ({targets.dtype})" if isinstance(targets, Tensor) else ""
        remedy = f"; {_remedy(outputs, targets)}" if both and outputs.shape != targets.shape else ""
        raise InputError(
            f"the loss can't be applied to outputs of shape {shape(outputs)} and targets of shape {shape(targets)}{kind}: "
            f"{first_line(error).removesuffix('.')}{remedy}."
        ) from error
    if not isinstance(losses, Tensor):
        raise InputError(f"the loss returned a {type(losses).__name__}; it must return a tensor, one number per row.")
    other_shape = both and outputs.shape != targets.shape and same_but_singletons(outputs, targets)
    if other_shape and _mixes(loss, outputs, targets):
        raise InputError(
            f"the loss mixes examples: outputs of shape {shape(outputs)} and targets of shape {shape(targets)} broadcast, "
            f"every output against every target; {_remedy(outputs, targets)}."
        )
    batch = len(targets)
    if tuple(losses.shape) != (batch,):
        several = losses.dim() > 1 and len(losses) == batch
        remedy = "with losses.flatten(1).mean(1)" if several else "with reduction='none'"
        wrong = f"the loss returned shape {tuple(losses.shape)} for a batch of {batch}"
        raise InputError(f"{wrong}; it must return one number per example, for example {remedy}.")
    if not losses.is_floating_point() or losses.dtype == torch.float16:
        raise InputError(f"the loss returned {losses.dtype}; it must return float32 or float64.")


def output_warning(loss: Loss, outputs: Any) -> str | None:
    """Return a warning if the outputs are not what the loss expects, such as probabilities instead of logits; otherwise None."""
    outputs, traits = read(loss, outputs), loss_traits(loss)
    if not isinstance(outputs, Tensor):
        return None
    last, step = "", outputs.grad_fn
    # Skip operations that only change the shape.
    while step is not None and (last := step.name().partition("Backward")[0]) in _SHAPING:
        last, step = "", step.next_functions[0][0] if step.next_functions else None
    if traits.kind == "binary" and traits.threshold == 0.0 and last == "Sigmoid":
        return "the model ends with a sigmoid, and the loss has its own: leave the model's out, or choose nn.BCELoss()."
    if traits.kind == "classes" and last == "Softmax":
        return "the model ends with a softmax, and the loss takes logits: leave the softmax out."
    if traits.log_probabilities and bool((outputs > 0).any()):
        return (
            "the loss takes log-probabilities, and the model's outputs are above 0: end the model with nn.LogSoftmax(dim=-1), or "
            "choose loss='cross-entropy', which takes logits."
        )
    return None


def check_labels(field: str, loss: Loss, outputs: Any, targets: Any) -> None:
    """Raise `InputError` if any label has no output, or any 0/1 target is outside [0, 1].

    `field` is the name of the targets in messages; `outputs` are those of a few rows, for the number of classes.
    """
    outputs, traits = read(loss, outputs), loss_traits(loss)
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or targets.numel() == 0:
        return
    if traits.kind == "binary":
        least, most = (float(value) for value in _range(targets))
        if least < 0 or most > 1:
            raise InputError(
                f"{field} are from {least:g} to {most:g}, and the loss needs 0 and 1; for labels −1 and 1 give "
                "(targets + 1) / 2, for more than two classes choose loss='cross-entropy'."
            )
    at = class_dimension(outputs, targets[: len(outputs)], second=traits.second)
    if traits.kind == "classes" and not targets.is_floating_point() and at is not None:
        low, high = (int(value) for value in _range(targets, traits.ignored))
        classes = outputs.shape[at]
        if classes > 1 and (low < 0 or high >= classes):
            raise InputError(
                f"{field} hold labels from {low} to {high}, and the model has {classes} outputs; labels must be from 0 to "
                f"{classes - 1}: number them from 0, or give the last layer {high - min(low, 0) + 1} outputs."
            )


def _range(targets: Tensor, ignored: int | None = None) -> tuple[float, float]:
    """The smallest and the largest target, without a copy of the targets; 0 and 0 where all are ignored."""
    found = []
    for part in targets.flatten(1).split(_ROWS) if targets.dim() > 1 else targets.split(_ROWS):
        kept = part if ignored is None else part[part != ignored]
        if kept.numel():
            found += [kept.min().item(), kept.max().item()]
    return min(found, default=0), max(found, default=0)


def _without_coincidence(outputs: Any, targets: Any) -> tuple[Any, Any]:
    """Return a number of rows that no other dimension has: (2, 2) minus (2,) broadcasts where (3, 2) minus (3,) fails."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)) or outputs.dim() == 0:
        return outputs, targets
    taken = {*outputs.shape[1:], *targets.shape[1:]}
    if len(outputs) != len(targets) or len(targets) not in taken:
        return outputs, targets
    rows = next(n for n in range(2, 100) if n not in taken)
    at = torch.arange(rows, device=targets.device) % len(targets)
    return outputs[at], targets[at]


def _mixes(loss: Loss, outputs: Tensor, targets: Tensor) -> bool:
    """Whether an example's loss depends on other rows. Made-up rows are tried first, because the given rows may be equal."""
    generator = torch.Generator().manual_seed(0)
    # On the CPU: a label that the loss does not know is an error there, but ends the process on a GPU.
    labels = (torch.arange(targets.numel()) % 2).reshape(targets.shape)
    numbers = [torch.rand(like.shape, generator=generator) for like in (outputs, targets)]
    made_up = numbers[0].to(outputs.dtype), (numbers[1] if targets.is_floating_point() else labels).to(targets.dtype)
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
    if not same_but_singletons(outputs, targets):
        return "give the last layer the outputs that this loss compares with these targets"
    if targets.dim() == 1:
        return "end the model with nn.Flatten(0), or give targets of shape (n, 1)"
    return f"give the targets the outputs' shape, {shape(outputs)}, for example with targets.reshape"
