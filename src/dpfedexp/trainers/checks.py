"""A model applied to a few rows before the first round: what does not fit names the layer and the remedy."""

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from dpfedexp.errors import InputError
from dpfedexp.inputs import Inputs, call, leaves, shape_of

T = TypeVar("T")
_ATTEMPTS = 3


def applied(model: nn.Module, x: Inputs) -> Any:
    """The outputs of a model, a copy that is not trained; raises `InputError` with the layer that could not take its inputs."""
    inside: list[tuple[str, nn.Module, Any]] = []
    hooks = []
    for name, part in model.named_modules():
        if next(part.children(), None) is None:
            hooks.append(
                part.register_forward_pre_hook(lambda part, given, name=name: inside.append((name, part, given)))
            )
            hooks.append(part.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        return call(model, x)
    except Exception as error:
        first = first_line(error).removesuffix(".")
        why = f"{first}." if not inside else _why(*inside[-1], first)
        raise InputError(f"the model can't be applied to a batch of inputs of shape {shape_of(x)}: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()


def check_draws(model: nn.Module, x: Inputs) -> None:
    """Raises `InputError` where a copy's pass draws from NumPy or Python: clients would share the draw, a recording repeat it."""

    def once() -> None:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            call(model, x)

    try:
        _, drawn = watching_draws(once)
    except Exception:
        return
    if drawn:
        raise InputError(
            "the model draws random numbers from NumPy or Python's random while it runs, which all clients would share; draw with "
            "torch.rand, torch.randn or dropout, which each client takes from its own key."
        )


def watching_draws(work: Callable[[], T]) -> tuple[T, bool]:
    """What `work` returns, and whether it drew from NumPy's or Python's global generators.

    Another thread of the process may draw meanwhile, as Flower's heartbeat does: then the work is done again. What draws does so
    every time.
    """
    for _ in range(_ATTEMPTS):
        before = generator_states()
        found = work()
        drawn = generator_states() != before
        if not drawn or threading.active_count() == 1:
            break
    return found, drawn


def generator_states() -> tuple[Any, ...]:
    """The states of NumPy's and Python's global generators."""
    numpy: Any = np.random.get_state()
    return bytes(numpy[1]), numpy[2:], random.getstate()


def _why(name: str, part: nn.Module, given: Any, error: str) -> str:
    layer = f"layer {name!r} ({type(part).__name__})" if name else f"the {type(part).__name__}"
    x = given[0] if given and isinstance(given[0], Tensor) else None
    if x is None:
        return f"{layer}: {error}."
    weight = getattr(part, "weight", None)
    if isinstance(part, nn.Embedding | nn.EmbeddingBag):
        if x.is_floating_point():
            return f"{layer} looks up whole numbers and was given {_kind(x)}; give the inputs as whole numbers (int64)."
        low, high, words = int(x.min()), int(x.max()), part.num_embeddings
        if low < 0 or high >= words:
            return (
                f"{layer} knows the numbers from 0 to {words - 1} and was given numbers from {low} to {high}; number them from 0, "
                f"or build it with num_embeddings={high + 1}."
            )
    elif isinstance(weight, Tensor) and x.dtype != weight.dtype:
        if not x.is_floating_point() and not x.is_complex():
            return (
                f"{layer} computes in {_kind(weight)} and was given {_kind(x)}; give the inputs as floats, x.float()."
            )
        return f"{layer} has parameters in {_kind(weight)} and was given {_kind(x)}; train the model in float32, model.float()."
    if isinstance(part, nn.Linear) and x.shape[-1:] != (part.in_features,):
        return (
            f"{layer} takes {part.in_features} features and was given shape {tuple(x.shape)}; build it with "
            f"in_features={x.shape[-1] if x.dim() else 1}, or bring the rows to that length first (nn.Flatten() joins the others)."
        )
    if isinstance(part, nn.modules.conv._ConvNd):
        return (
            f"{layer} takes rows of {part.in_channels} channels, (b, {part.in_channels}, …), and was given shape {tuple(x.shape)}; "
            "for images without a dimension of channels give x[:, None], for channels last x.movedim(-1, 1)."
        )
    return f"{layer} was given shape {tuple(x.shape)}: {error}."


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def furthest_rows(inputs: Inputs) -> Tensor:
    """The numbers of the rows that hold the least and the highest whole number, which an embedding may not know."""
    rows = []
    for value in leaves(inputs):
        if not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool and value.numel():
            each = value.flatten(1) if value.dim() > 1 else value[:, None]
            rows += [int(each.amax(1).argmax()), int(each.amin(1).argmin())]
    return torch.tensor(rows, dtype=torch.int64)


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
