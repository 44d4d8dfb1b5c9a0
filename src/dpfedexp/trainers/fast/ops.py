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

    Args:
        left, right: the factors.
        shape: of the parameter behind its first two dimensions, where it is not [b].
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, ...] = ()

    def tensor(self) -> Tensor:
        found = torch.bmm(self.left, self.right)
        return found.unflatten(2, self.shape) if self.shape else found

    def adds_to(self, value: Tensor) -> bool:
        """Whether the product can be added where `value` lies: of its type, or on a GPU in bf16 with sums in float32."""
        rounded = value.is_cuda and value.dtype == torch.float32 and self.left.dtype == torch.bfloat16
        return value.dtype == self.left.dtype or (rounded and "dtype_out" in torch.ops.aten.baddbmm.overloads())

    def add_to(self, value: Tensor, factor: float) -> None:
        """value ← value + factor·gradient, in place."""
        rows = value.view(*value.shape[:2], -1)
        if rows.dtype == self.left.dtype:
            rows.baddbmm_(self.left, self.right, alpha=factor)
        else:
            add = torch.ops.aten.baddbmm.dtype_out
            add(rows, self.left, self.right, rows.dtype, beta=1, alpha=factor, out=rows)


@dataclass(frozen=True)
class Later:
    """A parameter's gradient that costs a pass over the values, made when somebody asks: nobody does where it is frozen."""

    make: Callable[[], Tensor]

    def tensor(self) -> Tensor:
        return self.make()


Gradient = Tensor | Product | Later
Gradients = tuple[Sequence[Gradient], Sequence[Tensor | None]]


def multiplied(gradient: Gradient) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else gradient.tensor()


class Op(Protocol):
    """One operation on values [n, …, s] with parameters [n, …], one set per client.

    `forward` returns the output and what `backward` will ask for; `backward` returns the gradients of the parameters and of the
    inputs, where those are `wanted`.
    """

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]: ...

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients: ...


class Unsupported(Exception):
    """No rule covers this layer, or not in this use of it."""


def as_rows(x: Tensor) -> Tensor:
    """Values at positions, [n, positions, features, s], as rows of features, [n, s·positions, features].

    Every operation on values at positions leaves them like this in memory, so that this is a view: products of matrices, sums over
    features and attention all read it as it is.
    """
    return x.permute(0, 3, 1, 2).flatten(1, 2)


def from_rows(rows: Tensor, s: int) -> Tensor:
    """The inverse of `as_rows` for s samples, a view."""
    return rows.view(len(rows), s, -1, rows.shape[2]).permute(0, 2, 3, 1)


@dataclass(frozen=True)
class Linear:
    """y = Wx + b on [n, features, s], or at every position of [n, positions, features, s]."""

    bias: bool = True

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        if x.dim() not in (3, 4):
            raise Unsupported(f"a linear layer on values of {x.dim() - 1} dimensions")
        if x.dim() == 3:
            y = torch.bmm(params[0], x)
            return (y.add_(params[1].unsqueeze(2)) if self.bias else y), x
        rows = as_rows(x)
        y = torch.bmm(rows, params[0].transpose(1, 2))
        if self.bias:
            y = y.add_(params[1].unsqueeze(1))
        return from_rows(y, x.shape[3]), rows

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        at_positions = dy.dim() == 4
        given = as_rows(dy).transpose(1, 2) if at_positions else dy
        seen = saved if at_positions else saved.transpose(1, 2)
        grads: list[Gradient] = [Product(given, seen)]
        if self.bias:
            grads.append(Later(lambda: given.sum(2)))
        if not wanted:
            return grads, (None,)
        if at_positions:
            return grads, (from_rows(torch.bmm(given.transpose(1, 2), params[0]), dy.shape[3]),)
        return grads, (torch.bmm(params[0].transpose(1, 2), given),)


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
class AddParameter:
    """A parameter that is added to every sample of [n, …, s], such as one for each position, as torch's broadcasting has it."""

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        own = params[0].squeeze(1) if params[0].dim() == x.dim() else params[0]
        missing = x.dim() - 1 - own.dim()
        shape = (len(x), *[1] * missing, *own.shape[1:], 1)
        if missing < 0 or any(a not in (1, b) for a, b in zip(shape, x.shape, strict=True)):
            raise Unsupported("adding a parameter that is not of the shape of one sample")
        return x + own.view(shape), shape

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return [Later(lambda: dy.sum_to_size(saved).view(params[0].shape))], (dy,)


@dataclass(frozen=True)
class Scale:
    """A product with a number."""

    factor: float

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        return inputs[0] * self.factor, None

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), (dy * self.factor,)


@dataclass(frozen=True)
class Mean:
    """The mean over dimensions of a sample, numbered as the module numbers them, with the batch as 0."""

    dims: tuple[int, ...]

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        own = x.dim() - 1
        dims = tuple(sorted({dim + own if dim < 0 else dim for dim in self.dims}))
        if not dims or dims[0] < 1 or dims[-1] >= own:
            raise Unsupported("a mean over other dimensions than a sample's")
        return x.mean(dims), (dims, x.shape)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        dims, shape = saved
        share = dy / math.prod(shape[dim] for dim in dims)
        for dim in dims:
            share = share.unsqueeze(dim)
        share = share.expand(shape)
        return (), (from_rows(as_rows(share), shape[-1]) if len(shape) == 4 else share.contiguous(),)


@dataclass(frozen=True)
class Select:
    """One entry of a sample's first dimension, such as the last position."""

    index: int

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        if x.dim() < 3 or not -x.shape[1] <= self.index < x.shape[1]:
            raise Unsupported("an index that a sample does not have")
        return x.select(1, self.index), x

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        dx = torch.zeros_like(saved)
        dx.select(1, self.index).copy_(dy)
        return (), (dx,)


@dataclass(frozen=True)
class Embedding:
    """Rows of the table of each client: tokens [n, …, s] to [n, …, width, s].

    The gradient of a word that does not exist would be a neighbour's: the outputs of a client with such a word are not a number,
    and so is its update, which counts as 0.
    """

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        given = inputs[0].movedim(-1, 1)
        tokens = given.clamp(0, params[0].shape[1] - 1).contiguous()
        strange = torch.where((tokens != given).flatten(1).any(1), torch.nan, 0.0).to(params[0].dtype)
        y = params[0][_clients(tokens), tokens]
        return y.add_(strange.view(-1, *[1] * (y.dim() - 1))).movedim(1, -1), tokens

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        n, words, width = params[0].shape
        grad = torch.zeros(n * words, width, device=dy.device, dtype=dy.dtype)
        rows = saved + words * _clients(saved)
        grad.index_add_(0, rows.flatten(), dy.movedim(-1, 1).reshape(-1, width))
        return (grad.view(n, words, width),), (None,)


def _clients(tokens: Tensor) -> Tensor:
    """Whose tokens [n, …] are, in a shape that broadcasts with them."""
    return torch.arange(len(tokens), device=tokens.device).view(-1, *[1] * (tokens.dim() - 1))
