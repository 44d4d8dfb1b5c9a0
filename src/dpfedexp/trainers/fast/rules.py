"""What every layer is: the operations of a fast program in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast.attention import Attention, DroppedWeights, FeatureNorm
from dpfedexp.trainers.fast.convolution import Contract, Patches
from dpfedexp.trainers.fast.normalise import GroupNorm, LayerNorm
from dpfedexp.trainers.fast.ops import Op, Unsupported
from dpfedexp.trainers.fast.pooling import GlobalMeanPool, MaxPool, MeanPool
from dpfedexp.trainers.fast.window import Pair, Window
from dpfedexp.trainers.stepping import KEYS

Rule = Callable[[Any], Sequence[tuple[Op, Sequence[str]]]]
"""From a layer to the operations that it is, each with the names of the layer's parameters that it uses."""

RULES: dict[type[nn.Module], Rule] = {}


def register(kind: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Give a layer type a rule; a subclass is another type, because it may compute something else."""

    def keep(rule: Rule) -> Rule:
        RULES[kind] = rule
        return rule

    return keep


def _pair(value: Any) -> Pair:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def refuse(condition: bool, what: str) -> None:
    if condition:
        raise Unsupported(what)


def named(layer: nn.Module, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(layer, name) is not None)


@register(nn.Linear)
def _linear(layer: nn.Linear) -> Sequence[tuple[Op, Sequence[str]]]:
    return [(ops.Linear(layer.bias is not None), named(layer, "weight", "bias"))]


@register(nn.Conv2d)
def _conv(layer: nn.Conv2d) -> Sequence[tuple[Op, Sequence[str]]]:
    return [(Patches(window_of(layer)), ()), (Contract(layer.bias is not None), named(layer, "weight", "bias"))]


def window_of(layer: nn.Conv2d) -> Window:
    refuse(layer.groups != 1, "a grouped convolution")
    refuse(layer.padding_mode != "zeros" or isinstance(layer.padding, str), "this kind of padding")
    return Window(_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding), _pair(layer.dilation))


def _pool_size(layer: nn.MaxPool2d | nn.AvgPool2d) -> Pair:
    size = _pair(layer.kernel_size)
    stride = size if layer.stride is None else _pair(layer.stride)
    refuse(size != stride or _pair(layer.padding) != (0, 0) or layer.ceil_mode, "windows that overlap or are padded")
    return size


@register(nn.MaxPool2d)
def _max_pool(layer: nn.MaxPool2d) -> Sequence[tuple[Op, Sequence[str]]]:
    refuse(_pair(layer.dilation) != (1, 1) or layer.return_indices, "a max-pool with dilation or indices")
    return [(MaxPool(_pool_size(layer)), ())]


@register(nn.AvgPool2d)
def _mean_pool(layer: nn.AvgPool2d) -> Sequence[tuple[Op, Sequence[str]]]:
    refuse(layer.divisor_override is not None, "a mean-pool with a divisor of its own")
    return [(MeanPool(_pool_size(layer)), ())]


@register(nn.AdaptiveAvgPool2d)
def _global_pool(layer: nn.AdaptiveAvgPool2d) -> Sequence[tuple[Op, Sequence[str]]]:
    refuse(layer.output_size not in (1, (1, 1)), "adaptive pooling to more than one value")
    return [(GlobalMeanPool(), ())]


@register(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm) -> Sequence[tuple[Op, Sequence[str]]]:
    refuse(layer.affine and layer.bias is None, "a GroupNorm without bias")
    names = ("weight", "bias") if layer.affine else ()
    return [(GroupNorm(layer.num_groups, layer.eps, layer.affine), names)]


@register(nn.LayerNorm)
def _layer_norm(layer: nn.LayerNorm) -> Sequence[tuple[Op, Sequence[str]]]:
    return [
        (
            layer_norm(layer.normalized_shape, layer.eps, layer.weight is not None, layer.bias is not None),
            named(layer, "weight", "bias"),
        )
    ]


def layer_norm(shape: Sequence[int], eps: float, affine: bool, bias: bool) -> Op:
    plain = LayerNorm(tuple(shape), eps, affine, bias)
    return FeatureNorm(plain) if len(shape) == 1 else plain


@register(nn.Embedding)
def _embedding(layer: nn.Embedding) -> Sequence[tuple[Op, Sequence[str]]]:
    own_gradient = layer.padding_idx is not None or layer.scale_grad_by_freq or layer.sparse
    refuse(layer.max_norm is not None or (own_gradient and layer.weight.requires_grad), "an Embedding with options")
    return [(ops.Embedding(), ("weight",))]


@register(nn.Flatten)
def _flatten(layer: nn.Flatten) -> Sequence[tuple[Op, Sequence[str]]]:
    refuse(layer.start_dim < 0 or layer.end_dim != -1, "flattening some dimensions only")
    return [(ops.Flatten(layer.start_dim), ())]


def _activation(op: Op, layer: nn.Module) -> Sequence[tuple[Op, Sequence[str]]]:
    return [(op, ())]


for _kind, _op in ((nn.ReLU, ops.RELU), (nn.Tanh, ops.TANH), (nn.Sigmoid, ops.SIGMOID), (nn.SiLU, ops.SILU)):
    RULES[_kind] = partial(_activation, _op)
RULES[nn.GELU] = lambda layer: [(ops.gelu(layer.approximate), ())]
RULES[nn.LeakyReLU] = lambda layer: [(ops.leaky_relu(layer.negative_slope), ())]
RULES[nn.Identity] = lambda layer: []


FUNCTIONS: dict[Any, Op] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), ops.RELU),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh"), ops.TANH),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, "sigmoid"), ops.SIGMOID),
    F.silu: ops.SILU,
    F.gelu: ops.gelu("none"),
}
"""Activations that a module calls without a layer, as functions or as methods of its values."""


class Builder(Protocol):
    """What a rule for a layer of layers writes into."""

    def emit(self, op: Op, inputs: tuple[int, ...], params: tuple[str, ...] = ()) -> int:
        """A step; the parameters by their whole names. Returns the number of its output."""
        ...

    def layer(self, name: str, value: int) -> int:
        """A layer of the model, by its whole name, on a value."""
        ...

    def draw(self) -> int:
        """The number of the pass's next draw."""
        ...


def attention(
    build: Builder, name: str, layer: nn.MultiheadAttention, value: int, bias: Tensor | None, *, weights: bool
) -> int:
    """Self-attention; `weights` says whether the module asks for the weights too, which changes how torch draws."""
    refuse(not layer.batch_first, f"layer {name!r} (MultiheadAttention) does not have the batch first")
    packed = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
    refuse(not packed, f"layer {name!r} (MultiheadAttention) has options")
    projections = named(layer, "in_proj_weight", "in_proj_bias")
    value = build.emit(ops.Linear(len(projections) == 2), (value,), tuple(f"{name}.{part}" for part in projections))
    p = layer.dropout if layer.training else 0.0
    dropped = DroppedWeights(p, build.draw(), by_head=weights) if p > 0 else None
    value = build.emit(Attention(layer.num_heads, bias, dropped), (value,) if dropped is None else (value, KEYS))
    out = tuple(f"{name}.out_proj.{part}" for part in named(layer.out_proj, "weight", "bias"))
    return build.emit(ops.Linear(len(out) == 2), (value,), out)


def encoder_layer(build: Builder, name: str, layer: nn.TransformerEncoderLayer, value: int, bias: Tensor | None) -> int:
    def attended(x: int) -> int:
        x = attention(build, f"{name}.self_attn", layer.self_attn, x, bias, weights=False)
        return build.layer(f"{name}.dropout1", x)

    def transformed(x: int) -> int:
        x = build.layer(f"{name}.linear1", x)
        if isinstance(layer.activation, nn.Module):
            x = build.layer(f"{name}.activation", x)
        else:
            refuse(layer.activation not in FUNCTIONS, f"layer {name!r} has an activation without a rule")
            x = build.emit(FUNCTIONS[layer.activation], (x,))
        return build.layer(f"{name}.dropout2", build.layer(f"{name}.linear2", build.layer(f"{name}.dropout", x)))

    for part, norm in ((attended, f"{name}.norm1"), (transformed, f"{name}.norm2")):
        if layer.norm_first:
            value = build.emit(ops.Add(), (value, part(build.layer(norm, value))))
        else:
            value = build.layer(norm, build.emit(ops.Add(), (value, part(value))))
    return value


def encoder(build: Builder, name: str, layer: nn.TransformerEncoder, value: int, bias: Tensor | None) -> int:
    for number, part in enumerate(layer.layers):
        refuse(type(part) is not nn.TransformerEncoderLayer, f"layer {name!r} has layers of its own")
        value = encoder_layer(build, f"{name}.layers.{number}", part, value, bias)
    return value if layer.norm is None else build.layer(f"{name}.norm", value)


def as_bias(mask: Tensor) -> Tensor:
    """A mask of attention as what is added to the scores; booleans say where not to look."""
    refuse(mask.dim() != 2, "a mask of another shape than one sequence's")
    bias = mask.detach()
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, -torch.inf)
    refuse(bool((bias == -torch.inf).all(1).any()), "a mask that leaves a position nothing to look at")
    return bias
