"""A module from outside: its parameters as one flat vector, and what it is given and gives, one tensor or several."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from dpfedexp.errors import InputError

Params = dict[str, Tensor]


@dataclass(frozen=True)
class Layout:
    """The trainable parameters of a module, in order, as slices of a flat vector of length `dimension`."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @staticmethod
    def of(model: nn.Module) -> Layout:
        """The layout of a module. Frozen parameters (requires_grad=False) are no part of it: nothing of them is sent."""
        for name, parameter in model.named_parameters():
            if is_lazy(parameter):
                raise InputError(
                    f"the parameter {name!r} of the model has no shape yet; run one batch through the model before training, "
                    "such as model(inputs[:2])."
                )
        trainable = [(name, p.shape) for name, p in model.named_parameters() if p.requires_grad]
        if not trainable:
            raise InputError("the model has no trainable parameters; at least one must have requires_grad=True.")
        return Layout(tuple(n for n, _ in trainable), tuple(s for _, s in trainable))

    @property
    def sizes(self) -> list[int]:
        return [math.prod(shape) for shape in self.shapes]

    @property
    def dimension(self) -> int:
        return sum(self.sizes)

    def unflatten(self, flat: Tensor) -> Params:
        """Views into a vector [d], or into rows [n, d] as tensors [n, *shape]."""
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
