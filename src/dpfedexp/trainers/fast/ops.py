"""What a layer does for many clients at once: forward, and the gradient written by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

Saved = Any


@dataclass(frozen=True)
class Product:
    """A parameter's gradient left·right, [n, a, k] times [n, k, b], that is not multiplied out yet.

    A gradient as large as the parameters is memory that is written, read and thrown away. Whoever only subtracts it lets the
    product of matrices do so.
    """

    left: Tensor
    right: Tensor

    def tensor(self) -> Tensor:
        return torch.bmm(self.left, self.right)

    def add_to(self, value: Tensor, factor: float) -> None:
        """value ← value + factor·gradient, in place; `value` has the type of the factors."""
        value.baddbmm_(self.left, self.right, alpha=factor)


Gradient = Tensor | Product
Gradients = tuple[Sequence[Gradient], Sequence[Tensor | None]]


def multiplied(gradient: Gradient) -> Tensor:
    return gradient.tensor() if isinstance(gradient, Product) else gradient


class Op(Protocol):
    """One operation on values [n, …, s] with parameters [n, …], one set per client.

    `forward` returns the output and what `backward` will ask for; `backward` returns the gradients of the parameters and of the
    inputs, where those are `wanted`.
    """

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]: ...

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients: ...


class Unsupported(Exception):
    """No rule covers this layer, or not in this use of it."""


@dataclass(frozen=True)
class Linear:
    """y = Wx + b on [n, features, s], or at every position of [n, positions, features, s]."""

    bias: bool = True

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        if x.dim() not in (3, 4):
            raise Unsupported(f"a linear layer on values of {x.dim() - 1} dimensions")
        flat = x if x.dim() == 3 else x.transpose(1, 2).flatten(2)
        y = torch.bmm(params[0], flat)
        if self.bias:
            y = y.add_(params[1].unsqueeze(2))
        if x.dim() == 4:
            y = y.unflatten(2, (x.shape[1], x.shape[3])).transpose(1, 2)
        return y, (flat, x.shape)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        flat, shape = saved
        rows = dy if dy.dim() == 3 else dy.transpose(1, 2).flatten(2)
        grads: list[Gradient] = [Product(rows, flat.transpose(1, 2))]
        if self.bias:
            grads.append(rows.sum(2))
        dx = None
        if wanted:
            dx = torch.bmm(params[0].transpose(1, 2), rows)
            if len(shape) == 4:
                dx = dx.unflatten(2, (shape[1], shape[3])).transpose(1, 2)
        return grads, (dx,)


@dataclass(frozen=True)
class Pointwise:
    """An activation: `apply(x)`, and `derive(dy, x, y)`."""

    apply: Callable[[Tensor], Tensor]
    derive: Callable[[Tensor, Tensor, Tensor], Tensor]

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        y = self.apply(inputs[0])
        return y, (inputs[0], y)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), (self.derive(dy, *saved),)


aten = torch.ops.aten
RELU = Pointwise(torch.relu, lambda dy, x, y: aten.threshold_backward(dy, y, 0))
TANH = Pointwise(torch.tanh, lambda dy, x, y: aten.tanh_backward(dy, y))
SIGMOID = Pointwise(torch.sigmoid, lambda dy, x, y: aten.sigmoid_backward(dy, y))
SILU = Pointwise(torch.nn.functional.silu, lambda dy, x, y: aten.silu_backward(dy, x))


def gelu(approximate: str) -> Pointwise:
    return Pointwise(
        lambda x: torch.nn.functional.gelu(x, approximate=approximate),
        lambda dy, x, y: aten.gelu_backward(dy, x, approximate=approximate),
    )


def leaky_relu(slope: float) -> Pointwise:
    return Pointwise(
        lambda x: torch.nn.functional.leaky_relu(x, slope),
        lambda dy, x, y: aten.leaky_relu_backward(dy, x, slope, False),
    )


@dataclass(frozen=True)
class Flatten:
    """All dimensions of a sample into one; from the batch dimension on only where a sample is a single number."""

    start: int = 1

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        n, s = x.shape[0], x.shape[-1]
        if self.start == 0:
            if math.prod(x.shape[1:-1]) != 1:
                raise Unsupported("flattening the batch into the features")
            return x.reshape(n, s), x.shape
        if self.start >= x.dim() - 1:
            return x, x.shape
        return x.flatten(self.start, -2), x.shape

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), (dy.reshape(saved),)


@dataclass(frozen=True)
class Squeeze:
    """The last dimension of a sample, of length 1, away."""

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        if x.dim() < 3 or x.shape[-2] != 1:
            raise Unsupported("squeezing a dimension that is not 1")
        return x.squeeze(-2), None

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), (dy.unsqueeze(-2),)


@dataclass(frozen=True)
class Add:
    """A residual connection."""

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        a, b = inputs
        if a.shape != b.shape:
            raise Unsupported("adding values of different shapes")
        return a + b, None

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), (dy, dy)


@dataclass(frozen=True)
class Embedding:
    """Rows of the table of each client: tokens [n, …, s] to [n, …, width, s]."""

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (tokens,) = inputs
        (table,) = params
        n, words, width = table.shape
        client = torch.arange(n, device=tokens.device).view(-1, *[1] * (tokens.dim() - 1))
        rows = tokens + words * client
        y = table.reshape(n * words, width)[rows].movedim(-1, -2)
        return y, rows

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        n, words, width = params[0].shape
        grad = torch.zeros(n * words, width, device=dy.device, dtype=dy.dtype)
        grad.index_add_(0, saved.flatten(), dy.movedim(-2, -1).reshape(-1, width))
        return (grad.view(n, words, width),), (None,)
