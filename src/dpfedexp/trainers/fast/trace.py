"""From an nn.Module to a `Program`, where every layer that it calls has a rule."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast.convolution import Contract, ContractAndPool, Patches
from dpfedexp.trainers.fast.dropout import Dropout
from dpfedexp.trainers.fast.normalise import GroupNorm, LayerNorm
from dpfedexp.trainers.fast.ops import Op, Unsupported
from dpfedexp.trainers.fast.pooling import GlobalMeanPool, MaxPool, MeanPool
from dpfedexp.trainers.fast.program import Program, Step
from dpfedexp.trainers.fast.window import Pair, Window
from dpfedexp.trainers.stepping import INPUT, KEYS

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


def _refuse(condition: bool, what: str) -> None:
    if condition:
        raise Unsupported(what)


def _named(layer: nn.Module, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(layer, name) is not None)


@register(nn.Linear)
def _linear(layer: nn.Linear) -> Sequence[tuple[Op, Sequence[str]]]:
    return [(ops.Linear(layer.bias is not None), _named(layer, "weight", "bias"))]


@register(nn.Conv2d)
def _conv(layer: nn.Conv2d) -> Sequence[tuple[Op, Sequence[str]]]:
    return [(Patches(_window(layer)), ()), (Contract(layer.bias is not None), _named(layer, "weight", "bias"))]


def _window(layer: nn.Conv2d) -> Window:
    _refuse(layer.groups != 1, "a grouped convolution")
    _refuse(layer.padding_mode != "zeros" or isinstance(layer.padding, str), "this kind of padding")
    return Window(_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding), _pair(layer.dilation))


def _pool_size(layer: nn.MaxPool2d | nn.AvgPool2d) -> Pair:
    size = _pair(layer.kernel_size)
    stride = size if layer.stride is None else _pair(layer.stride)
    _refuse(size != stride or _pair(layer.padding) != (0, 0) or layer.ceil_mode, "windows that overlap or are padded")
    return size


@register(nn.MaxPool2d)
def _max_pool(layer: nn.MaxPool2d) -> Sequence[tuple[Op, Sequence[str]]]:
    _refuse(_pair(layer.dilation) != (1, 1) or layer.return_indices, "a max-pool with dilation or indices")
    return [(MaxPool(_pool_size(layer)), ())]


@register(nn.AvgPool2d)
def _mean_pool(layer: nn.AvgPool2d) -> Sequence[tuple[Op, Sequence[str]]]:
    _refuse(layer.divisor_override is not None, "a mean-pool with a divisor of its own")
    return [(MeanPool(_pool_size(layer)), ())]


@register(nn.AdaptiveAvgPool2d)
def _global_pool(layer: nn.AdaptiveAvgPool2d) -> Sequence[tuple[Op, Sequence[str]]]:
    _refuse(layer.output_size not in (1, (1, 1)), "adaptive pooling to more than one value")
    return [(GlobalMeanPool(), ())]


@register(nn.GroupNorm)
def _group_norm(layer: nn.GroupNorm) -> Sequence[tuple[Op, Sequence[str]]]:
    _refuse(layer.affine and layer.bias is None, "a GroupNorm without bias")
    names = ("weight", "bias") if layer.affine else ()
    return [(GroupNorm(layer.num_groups, layer.eps, layer.affine), names)]


@register(nn.LayerNorm)
def _layer_norm(layer: nn.LayerNorm) -> Sequence[tuple[Op, Sequence[str]]]:
    affine, bias = layer.weight is not None, layer.bias is not None
    names = _named(layer, "weight", "bias")
    return [(LayerNorm(tuple(layer.normalized_shape), layer.eps, affine, bias), names)]


@register(nn.Embedding)
def _embedding(layer: nn.Embedding) -> Sequence[tuple[Op, Sequence[str]]]:
    plain = layer.padding_idx is None and layer.max_norm is None and not layer.scale_grad_by_freq and not layer.sparse
    _refuse(not plain, "an Embedding with options")
    return [(ops.Embedding(), ("weight",))]


@register(nn.Flatten)
def _flatten(layer: nn.Flatten) -> Sequence[tuple[Op, Sequence[str]]]:
    _refuse(layer.start_dim < 0 or layer.end_dim != -1, "flattening some dimensions only")
    return [(ops.Flatten(layer.start_dim), ())]


def _activation(op: Op, layer: nn.Module) -> Sequence[tuple[Op, Sequence[str]]]:
    return [(op, ())]


for _kind, _op in ((nn.ReLU, ops.RELU), (nn.Tanh, ops.TANH), (nn.Sigmoid, ops.SIGMOID), (nn.SiLU, ops.SILU)):
    RULES[_kind] = partial(_activation, _op)
RULES[nn.GELU] = lambda layer: [(ops.gelu(layer.approximate), ())]
RULES[nn.LeakyReLU] = lambda layer: [(ops.leaky_relu(layer.negative_slope), ())]
RULES[nn.Identity] = lambda layer: []


def compile_module(model: nn.Module, trainable: Sequence[str]) -> Program:
    """The program of a module, or `Unsupported` with the reason."""
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        _refuse(any(hooks), f"hooks on layer {name!r}")
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        raise Unsupported(f"the module can't be traced ({type(error).__name__})") from error
    return _Translation(model, graph, frozenset(trainable)).program()


def _bound(p: Any = 0.5, training: Any = True, inplace: Any = False) -> tuple[Any, Any, Any]:
    """The arguments of a call of `F.dropout` behind its input."""
    return p, training, inplace


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in RULES or super().is_leaf_module(m, module_qualified_name)


@dataclass
class _Translation:
    model: nn.Module
    graph: fx.Graph
    trainable: frozenset[str]
    steps: list[Step] = field(default_factory=list)
    values: dict[fx.Node, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    skip: set[fx.Node] = field(default_factory=set)
    calls: int = 0

    def program(self) -> Program:
        output = None
        for node in self.graph.nodes:
            if node in self.skip or node.op == "get_attr":
                continue
            if node.op == "placeholder":
                _refuse(INPUT in self.values.values(), "a module with several inputs")
                self.values[node] = INPUT
            elif node.op == "output":
                _refuse(not isinstance(node.args[0], fx.Node), "a module with several outputs")
                output = self.values[node.args[0]]
            elif node.op == "call_module":
                self._module(node)
            else:
                self._function(node)
        if output is None:
            raise Unsupported("a module without an output")
        unused = self.trainable - self.used
        _refuse(bool(unused), f"parameter {min(unused, default='')!r} is not used")
        return Program(tuple(self.steps), output)

    def _module(self, node: fx.Node) -> None:
        layer = self.model.get_submodule(str(node.target))
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            p = layer.p if layer.training else 0.0
            known = type(layer) in (nn.Dropout, nn.Dropout2d) and not layer.inplace
            _refuse(p > 0 and not known, f"layer {node.target!r} ({type(layer).__name__}) has no rule")
            self._dropout(node, p, type(layer) is nn.Dropout2d)
            return
        if type(layer) not in RULES:
            raise Unsupported(f"layer {node.target!r} ({type(layer).__name__}) has no rule")
        _refuse(len(node.args) != 1 or bool(node.kwargs), f"layer {node.target!r} takes several arguments")
        value = self._value(node.args[0])
        _refuse(getattr(layer, "inplace", False) and len(node.args[0].users) > 1, "an in-place layer on a shared value")  # type: ignore[union-attr]
        pooled = self._pool_behind(node)
        if isinstance(layer, nn.Conv2d) and pooled is not None:
            self._pooled_conv(layer, str(node.target), value, pooled)
            return
        for op, names in RULES[type(layer)](layer):
            value = self._emit(op, (value,), tuple(f"{node.target}.{name}" for name in names))
        self.values[node] = value

    def _dropout(self, node: fx.Node, p: float, channels: bool) -> None:
        value = self._value(node.args[0])
        if p > 0:
            self.calls += 1
            value = self._emit(Dropout(p, self.calls, channels), (value, KEYS))
        self.values[node] = value

    def _pool_behind(self, node: fx.Node) -> list[fx.Node] | None:
        """The chain [ReLU …, MaxPool2d] that alone reads this convolution: both orders of ReLU and max give the same."""
        chain: list[fx.Node] = []
        at = node
        while len(at.users) == 1:
            (at,) = at.users
            chain.append(at)
            kind = type(self.model.get_submodule(str(at.target))) if at.op == "call_module" else None
            if kind is nn.MaxPool2d:
                return chain
            if kind is not nn.ReLU and not (at.op == "call_function" and at.target in (F.relu, torch.relu)):
                return None
        return None

    def _pooled_conv(self, layer: nn.Conv2d, name: str, value: int, chain: list[fx.Node]) -> None:
        pool = RULES[nn.MaxPool2d](self.model.get_submodule(str(chain[-1].target)))[0][0].pool  # type: ignore[attr-defined]
        window = _window(layer)
        value = self._emit(Patches(window.pooled(pool)), (value,), ())
        names = tuple(f"{name}.{part}" for part in _named(layer, "weight", "bias"))
        value = self._emit(ContractAndPool(window, pool, layer.bias is not None), (value,), names)
        if len(chain) > 1:
            value = self._emit(ops.RELU, (value,), ())
        self.skip.update(chain)
        self.values[chain[-1]] = value

    def _function(self, node: fx.Node) -> None:
        target, args, kwargs = node.target, node.args, node.kwargs
        if target is F.linear:
            given = [*args[1:], *(kwargs[name] for name in ("weight", "bias") if name in kwargs)]
            names = [str(part.target) for part in given if isinstance(part, fx.Node) and part.op == "get_attr"]
            _refuse(len(names) != sum(part is not None for part in given), "a linear function of computed weights")
            self.values[node] = self._emit(ops.Linear(len(names) == 2), (self._value(args[0]),), tuple(names))
        elif target is F.dropout:
            p, training, inplace = _bound(*args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
            _refuse(not isinstance(p, float) or not isinstance(training, bool) or bool(inplace), "this dropout")
            self._dropout(node, p if training else 0.0, False)
        elif target in (F.relu, torch.relu, "relu"):
            _refuse(len(args) != 1 or bool(kwargs.get("inplace")), "an in-place ReLU")
            self.values[node] = self._emit(ops.RELU, (self._value(args[0]),))
        elif target in (operator.add, torch.add) and not kwargs and all(isinstance(a, fx.Node) for a in args):
            self.values[node] = self._emit(ops.Add(), tuple(self._value(a) for a in args))
        elif target in (torch.flatten, "flatten"):
            start = args[1] if len(args) == 2 else kwargs.get("start_dim", 0)
            _refuse(len(args) > 2 or "end_dim" in kwargs or not isinstance(start, int) or start < 0, "this flattening")
            self.values[node] = self._emit(ops.Flatten(start), (self._value(args[0]),))  # type: ignore[arg-type]
        elif target in (torch.squeeze, "squeeze") and (args[1:] == (-1,) or kwargs == {"dim": -1}):
            self.values[node] = self._emit(ops.Squeeze(), (self._value(args[0]),))
        else:
            raise Unsupported(f"the call of {getattr(target, '__name__', target)} has no rule")

    def _value(self, node: Any) -> int:
        if not isinstance(node, fx.Node) or node not in self.values:
            raise Unsupported("a layer reads something that is not a value of the network")
        return self.values[node]

    def _emit(self, op: Op, inputs: tuple[int, ...], params: tuple[str, ...] = ()) -> int:
        for name in params:
            _refuse(name not in self.trainable, f"parameter {name!r} is frozen")
            _refuse(name in self.used, f"parameter {name!r} is used more than once")
            self.used.add(name)
        output = len(self.steps) + 1
        self.steps.append(Step(op, inputs, output, params))
        return output
