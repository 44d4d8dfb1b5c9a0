"""Between a module's parameters and one flat vector."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

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
