"""Layer operations for many clients at once, on values [n, …, s] with parameters [n, …]: one set per client, samples last.

Matrix products have hand-written gradients. Everything else is a function that autograd differentiates.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from dpfedexp.machine import has_triton
from dpfedexp.trainers.draws import dropout_mask, kept_share

Saved = Any
INPUT = 0
"""The index of the data among a program's values."""
KEYS = -1
"""The index of the clients' keys of a step, [n], among a program's values; used only by modules that draw."""


Gradient = Tensor | Callable[[], Tensor]
"""A parameter's gradient, or a function that computes it, which is never called for a frozen parameter."""
Gradients = tuple[Sequence[Gradient], Sequence[Tensor | None]]


def computed(gradient: Gradient) -> Tensor:
    return gradient if isinstance(gradient, Tensor) else gradient()


class Op(Protocol):
    """A layer operation: `forward` returns output and saved values, `backward` the gradients of parameters and of inputs."""

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]: ...

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients: ...


class Unsupported(Exception):
    """Raised if no rule covers a layer, or this use of it."""


def refuse(condition: bool, what: str) -> None:
    if condition:
        raise Unsupported(what)


@dataclass(frozen=True)
class Function:
    """The operation `apply(*inputs, *params)`, differentiated by autograd."""

    apply: Callable[..., Tensor]

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        with torch.enable_grad():
            # Not detach(): parameters may be views of one row, which a step updates one after the other.
            given = [value.data.requires_grad_(value.is_floating_point()) for value in (*inputs, *params)]
            y = self.apply(*given)
        return y.detach(), (given, y)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        given, y = saved
        count = len(given) - len(params)
        found = torch.autograd.grad(y, given if wanted else given[count:], dy)
        return found[-len(params) :] if params else (), found[:count] if wanted else (None,) * count


def by_sample(apply: Callable[..., Tensor]) -> Function:
    """The operation of a function on a batch [samples, …] that treats every sample separately."""

    def on_values(x: Tensor) -> Tensor:
        y = apply(x.movedim(-1, 1).flatten(0, 1))
        refuse(len(y) != len(x) * x.shape[-1], "a call that changes the number of samples")
        return cast(Tensor, y.unflatten(0, (len(x), x.shape[-1])).movedim(1, -1))

    return Function(on_values)


def added(a: Tensor, b: Tensor) -> Tensor:
    refuse(a.shape != b.shape, "adding values of different shapes")
    return a + b


def with_parameter(x: Tensor, own: Tensor) -> Tensor:
    """Add a parameter to every sample, such as a position embedding, with torch's broadcasting."""
    rows = x.movedim(-1, 1)
    shape = (len(x), *[1] * (rows.dim() - own.dim()), *own.shape[1:])
    fits = len(shape) == rows.dim() and shape[1] == 1
    fits = fits and all(a in (1, b) for a, b in zip(shape[2:], rows.shape[2:], strict=True))
    refuse(not fits, "adding a parameter that is not of the shape of one sample")
    return (rows + own.view(shape)).movedim(1, -1)


def flattened(x: Tensor, start: int) -> Tensor:
    """Flatten all dimensions of a sample; from the batch dimension on only if a sample is a single number."""
    if start == 0:
        refuse(math.prod(x.shape[1:-1]) != 1, "flattening the batch into the features")
        return x.reshape(len(x), x.shape[-1])
    return x if start >= x.dim() - 1 else x.flatten(start, -2)


def normalized(x: Tensor, *params: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
    """LayerNorm of every sample over its last dimensions, of `shape`, with the client's weight and bias, if any."""
    rows = x.movedim(-1, 1)
    fits = tuple(rows.shape[-len(shape) :]) == shape and rows.dim() >= 2 + len(shape)
    refuse(not fits, "a LayerNorm of another shape than its input's")
    y = F.layer_norm(rows, shape, None, None, eps)
    own = [part.view(len(x), *[1] * (y.dim() - part.dim()), *shape) for part in params]
    if own:
        y = y * own[0] if len(own) == 1 else torch.addcmul(own[1], y, own[0])
    return y.movedim(1, -1)


def attended(x: Tensor, heads: int, bias: Tensor | None) -> Tensor:
    """softmax(q·kᵀ/√d + bias)·v by heads: from concatenated q, k and v, [n, l, 3·width, s], to [n, l, width, s]."""
    refuse(x.dim() != 4 or x.shape[2] % (3 * heads) != 0, "attention on values that are not at positions")
    n, length, width, s = x.shape
    refuse(bias is not None and bias.shape != (length, length), "a mask of another shape than one sequence's")
    packed = as_rows(x).reshape(n * s, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = packed.unbind(0)
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    weights = torch.softmax(scores if bias is None else scores + bias, -1)
    return from_rows((weights @ value).transpose(1, 2).reshape(n, s * length, width // 3), s)


def as_rows(x: Tensor) -> Tensor:
    """Reshape values of n clients and s samples, [n, positions, features, s], to rows of features, [n, s·positions, features]."""
    return x.permute(0, 3, 1, 2).flatten(1, 2)


def from_rows(rows: Tensor, s: int) -> Tensor:
    """The inverse of `as_rows` for s samples, as a view."""
    return rows.view(len(rows), s, -1, rows.shape[2]).permute(0, 2, 3, 1)


@dataclass(frozen=True)
class Linear:
    """y = Wx + b on [n, features, s], or at every position of [n, positions, features, s]."""

    bias: bool = True

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        refuse(x.dim() not in (3, 4), f"a linear layer on values of {x.dim() - 1} dimensions")
        if x.dim() == 3:
            y = torch.bmm(params[0], x)
            return (y.add_(params[1].unsqueeze(2)) if self.bias else y), x
        rows = as_rows(x)
        y = torch.bmm(rows, params[0].transpose(1, 2))
        return from_rows(y.add_(params[1].unsqueeze(1)) if self.bias else y, x.shape[3]), rows

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        at_positions = dy.dim() == 4
        given = as_rows(dy).transpose(1, 2) if at_positions else dy
        seen = saved if at_positions else saved.transpose(1, 2)
        grads: list[Gradient] = [lambda: torch.bmm(given, seen)]
        if self.bias:
            grads.append(lambda: given.sum(2))
        if not wanted:
            return grads, (None,)
        if at_positions:
            return grads, (from_rows(torch.bmm(given.transpose(1, 2), params[0]), dy.shape[3]),)
        return grads, (torch.bmm(params[0].transpose(1, 2), given),)


@dataclass(frozen=True)
class Embedding:
    """Look up rows of each client's table: tokens [n, …, s] to [n, …, width, s], for n clients and s samples of each.

    A token outside the table would read another client's row. Instead, all outputs of that client become NaN, and its
    update counts as 0.
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
    """The client index of tokens [n, …], in a shape that broadcasts with them."""
    return torch.arange(len(tokens), device=tokens.device).view(-1, *[1] * (tokens.dim() - 1))


@dataclass(frozen=True)
class Dropout:
    """y = x·mask/(1 − p) on [n, …, s]; the mask is draw number `call` of a pass from the clients' keys [n], the second input."""

    p: float
    call: int
    channels: bool = False

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        x, keys = inputs
        lead = 2 if self.channels else x.dim() - 1
        shape = (x.shape[-1], *x.shape[1:lead], *[1] * (x.dim() - 1 - lead))
        mask = dropout_mask(keys, self.call, self.p, shape, x.dtype, rows_last=True) * kept_share(self.p)
        return x * mask, mask

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        return (), (dy * saved if wanted else None, None)


@dataclass(frozen=True)
class GroupNorm:
    """Normalize every group of channels of every sample by its own mean and variance; with triton kernels on a GPU."""

    groups: int
    eps: float

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        (x,) = inputs
        if _has_kernels(x):
            from dpfedexp.trainers.fast import kernels

            return kernels.normalized(x.contiguous(), self.groups, self.eps, *params)
        return self._by_torch.forward(params, x)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        if not _has_kernels(dy):
            return self._by_torch.backward(params, saved, dy, wanted)
        from dpfedexp.trainers.fast import kernels

        dx, *grads = kernels.gradients(dy.contiguous(), saved, *params, wanted=wanted)
        return grads if params else (), (dx,)

    @property
    def _by_torch(self) -> Function:
        def apply(x: Tensor, *params: Tensor) -> Tensor:
            rows = x.reshape(len(x), self.groups, -1, x.shape[-1])
            variance, mean = torch.var_mean(rows, dim=2, correction=0, keepdim=True)
            y = ((rows - mean) * torch.rsqrt(variance + self.eps)).view(x.shape)
            own = [part.view(*part.shape, *[1] * (x.dim() - 2)) for part in params]
            return y * own[0] + own[1] if own else y

        return Function(apply)


def _has_kernels(x: Tensor) -> bool:
    """Whether the triton kernels support these values: on a GPU with triton, with 32-bit indices within a client."""
    return x.is_cuda and has_triton() and x[0].numel() < 2**31
