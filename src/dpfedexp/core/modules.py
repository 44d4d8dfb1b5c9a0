"""A model of torch: its parameters as one flat vector, and its inputs and outputs, which are one tensor or several."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from dpfedexp.errors import InputError, require

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a module, in order, as slices of a flat vector of length `dimension`."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """The layout of a module. Frozen parameters (requires_grad=False) are not part of it and are never sent."""
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                lazy = f"the parameter {name!r} of the model has no shape yet"
                raise InputError(f"{lazy}; run one batch through the model before training, such as model(inputs[:2]).")
        trainable = [(name, p.shape) for name, p in model.named_parameters() if p.requires_grad]
        require(bool(trainable), "the model has no trainable parameters; at least one must have requires_grad=True.")
        return cls(tuple(n for n, _ in trainable), tuple(s for _, s in trainable))

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def dimension(self) -> int:
        return sum(self.sizes)

    def unflatten(self, flat: Tensor) -> Params:
        """Views of the parameters in a vector [d], or in rows [n, d] as tensors [n, *shape]."""
        lead = flat.shape[:-1]
        parts = flat.split(self.sizes, dim=-1)
        return {n: p.view((*lead, *s)) for n, s, p in zip(self.names, self.shapes, parts, strict=True)}

    def flatten(self, params: Params, rows: int | None = None) -> Tensor:
        """The inverse of `unflatten`; `rows` is the client dimension of stacked parameters."""
        lead = () if rows is None else (rows,)
        return torch.cat([params[n].reshape(*lead, -1) for n in self.names], dim=-1)

    def read(self, model: nn.Module) -> Tensor:
        """A copy of the module's parameters as a float64 vector."""
        params = dict(model.named_parameters())
        return torch.cat([params[n].detach().reshape(-1).double() for n in self.names])

    def write(self, model: nn.Module, w: Tensor) -> None:
        with torch.no_grad():
            params = dict(model.named_parameters())
            for name, value in self.unflatten(w).items():
                params[name].copy_(value)


Inputs = Any
"""A tensor, for model(x); a tuple of tensors, for model(*x); or a dictionary of them, for model(**x)."""


def leaves(x: Inputs) -> list[Tensor]:
    """The tensors of the inputs, in order."""
    if isinstance(x, Tensor):
        return [x]
    return list(x.values()) if isinstance(x, dict) else list(x)


def each(function: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply a function to every tensor of the inputs; returns the same structure."""
    if isinstance(x, Tensor):
        return function(x)
    if isinstance(x, dict):
        return {name: function(value) for name, value in x.items()}
    return tuple(function(value) for value in x)


def arguments(x: Inputs) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """The positional and the keyword arguments with which a module is called on these inputs."""
    if isinstance(x, Tensor):
        return (x,), {}
    return ((), x) if isinstance(x, dict) else (x, {})


def call(module: nn.Module, x: Inputs) -> Any:
    by_place, by_name = arguments(x)
    return module(*by_place, **by_name)


def in_float(outputs: Any) -> Any:
    """Convert floating-point outputs to float32, also in nested structures."""
    return tree_map_only(Tensor, lambda value: value.float() if value.is_floating_point() else value, outputs)


def shape_of(x: Any) -> str:
    """Shapes as text for a message; for values that are not tensors, their class."""
    if isinstance(x, dict):
        return "{" + ", ".join(f"{name}: {shape_of(value)}" for name, value in x.items()) + "}"
    if isinstance(x, tuple | list):
        return "(" + ", ".join(shape_of(value) for value in x) + ")"
    return str(tuple(x.shape)) if isinstance(x, Tensor) else f"a {type(x).__name__}"
