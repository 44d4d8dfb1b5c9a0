"""What a module is given and gives: one tensor, or several by place or by name."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

Inputs = Any
"""A tensor, for model(x); a tuple of tensors, for model(*x); or a dictionary of them, for model(**x)."""


def leaves(x: Inputs) -> list[Tensor]:
    """The tensors of inputs, in order."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, dict) else list(x)


def each(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """The same structure with a function of every tensor."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(value) for name, value in x.items()}
    return tuple(function(value) for value in x)


def arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """How a module is called with these inputs."""
    if isinstance(x, Tensor):
        return (x,), {}
    return ((), x) if isinstance(x, dict) else (x, {})


def call(module: nn.Module, x: Inputs) -> Any:
    """The module's outputs."""
    by_place, by_name = arguments(x)
    return module(*by_place, **by_name)


def in_float(outputs: Any) -> Any:
    """Outputs in float32, those of several parts too."""
    return tree_map_only(Tensor, lambda value: value.float() if value.is_floating_point() else value, outputs)


def shape_of(x: Any) -> str:
    """Shapes for a sentence; of something else than tensors its class."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name}: {shape_of(value)}" for name, value in x.items()) + "}"
    if isinstance(x, tuple | list):
        return "(" + ", ".join(shape_of(value) for value in x) + ")"
    return str(tuple(x.shape)) if isinstance(x, Tensor) else f"a {type(x).__name__}"
