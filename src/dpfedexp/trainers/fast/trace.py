"""From an nn.Module to a `Program`, where every layer that it calls has a rule."""

from __future__ import annotations

import copy
import inspect
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast import rules as layers
from dpfedexp.trainers.fast.convolution import ContractAndPool, Patches
from dpfedexp.trainers.fast.dropout import Dropout
from dpfedexp.trainers.fast.ops import Op, Unsupported
from dpfedexp.trainers.fast.program import Program, Step
from dpfedexp.trainers.fast.rules import FUNCTIONS, RULES, named, refuse, register, window_of
from dpfedexp.trainers.stepping import INPUT, KEYS

__all__ = ["RULES", "compile_module", "register"]


def compile_module(model: nn.Module, trainable: Sequence[str]) -> Program:
    """The program of a module, or `Unsupported` with the reason."""
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        refuse(any(hooks), f"hooks on layer {name!r}")
    # Tracing leaves traces on a module: on one of its own, which holds the same parameters and buffers.
    held: dict[int, Any] = {id(part): part for part in (*model.parameters(), *model.buffers())}
    traced = copy.deepcopy(model, held)
    try:
        graph = _Tracer().trace(traced)
    except Exception as error:
        raise Unsupported(f"the module can't be traced ({type(error).__name__})") from error
    graph.eliminate_dead_code(lambda node: node.op != "get_attr" and node.target not in _HARMLESS)
    for node in graph.nodes:
        refuse(
            not node.users and node.op != "output",
            f"nothing reads what {node.name!r} gives, which may change something",
        )
        refuse(
            node.op == "get_attr" and not hasattr(model, str(node.target).split(".")[0]), "a tensor made in `forward`"
        )
    return _Translation(model, graph, frozenset(trainable)).program()


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
    frozen: dict[str, Tensor] = field(default_factory=dict)
    skip: set[fx.Node] = field(default_factory=set)
    calls: int = 0

    def program(self) -> Program:
        output = None
        for node in self.graph.nodes:
            if node in self.skip or node.op == "get_attr":
                continue
            if node.op == "placeholder":
                refuse(INPUT in self.values.values(), "a module with several inputs")
                self.values[node] = INPUT
            elif node.op == "output":
                refuse(not isinstance(node.args[0], fx.Node), "a module with several outputs")
                output = self._value(node.args[0])
            elif node.op == "call_module":
                self._module(node)
            else:
                self._function(node)
        if output is None:
            raise Unsupported("a module without an output")
        unused = self.trainable - self.used
        refuse(bool(unused), f"parameter {min(unused, default='')!r} is not used")
        return Program(tuple(self.steps), output, self.frozen)

    def _module(self, node: fx.Node) -> None:
        name = str(node.target)
        layer = self.model.get_submodule(name)
        if type(layer) in _SEQUENCES:
            self.values[node] = self._sequence(node, name, layer)
            return
        refuse(len(node.args) != 1 or bool(node.kwargs), f"layer {name!r} takes several arguments")
        value = self._value(node.args[0])
        refuse(getattr(layer, "inplace", False) and len(node.args[0].users) > 1, "an in-place layer on a shared value")  # type: ignore[union-attr]
        pooled = self._pool_behind(node)
        if type(layer) is nn.Conv2d and pooled is not None:
            self._pooled_conv(layer, name, value, pooled)
        else:
            self.values[node] = self.layer(name, value)

    def layer(self, name: str, value: int) -> int:
        layer = self.model.get_submodule(name)
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            p = layer.p if layer.training else 0.0
            known = type(layer) in (nn.Dropout, nn.Dropout2d) and not layer.inplace
            refuse(p > 0 and not known, f"layer {name!r} ({type(layer).__name__}) has no rule")
            return self._dropout(value, p, type(layer) is nn.Dropout2d)
        refuse(type(layer) not in RULES, f"layer {name!r} ({type(layer).__name__}) has no rule")
        for op, names in RULES[type(layer)](layer):
            value = self.emit(op, (value,), tuple(f"{name}.{part}" for part in names))
        return value

    def _sequence(self, node: fx.Node, name: str, layer: Any) -> int:
        """Attention and what is made of it, in which only a constant mask may come beside the sequence."""
        given = inspect.signature(type(layer).forward).bind(layer, *node.args, **node.kwargs)
        given.apply_defaults()
        asked = given.arguments
        padding = asked.get("key_padding_mask", asked.get("src_key_padding_mask"))
        refuse(padding is not None, f"layer {name!r} takes a mask of padding")
        mask = next(asked[part] for part in ("attn_mask", "src_mask", "mask") if part in asked)
        bias = None if mask is None else layers.as_bias(self._constant(mask))
        if not isinstance(layer, nn.MultiheadAttention):
            make = layers.encoder if isinstance(layer, nn.TransformerEncoder) else layers.encoder_layer
            return make(self, name, layer, self._value(asked["src"]), bias)
        refuse(not asked["query"] is asked["key"] is asked["value"], f"layer {name!r} attends to something else")
        weights = {user for user in node.users if user.target is not operator.getitem or user.args[1] != 0}
        refuse(bool(weights), f"layer {name!r} gives its weights to another layer")
        value = self._value(asked["query"])
        value = layers.attention(self, name, layer, value, bias, weights=bool(asked["need_weights"]))
        self.values.update(dict.fromkeys(node.users, value))
        self.skip.update(node.users)
        return value

    def _constant(self, node: Any) -> Tensor:
        """A buffer or a frozen parameter that the module names."""
        refuse(not isinstance(node, fx.Node) or node.op != "get_attr", "a mask that is computed")
        name = str(node.target)
        found: Tensor = operator.attrgetter(name)(self.model)
        refuse(found.requires_grad, f"parameter {name!r} is a mask")
        return found

    def draw(self) -> int:
        self.calls += 1
        return self.calls

    def _dropout(self, value: int, p: float, channels: bool) -> int:
        return self.emit(Dropout(p, self.draw(), channels), (value, KEYS)) if p > 0 else value

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
        window = window_of(layer)
        value = self.emit(Patches(window.pooled(pool)), (value,), ())
        names = tuple(f"{name}.{part}" for part in named(layer, "weight", "bias"))
        value = self.emit(ContractAndPool(window, pool, layer.bias is not None), (value,), names)
        if len(chain) > 1:
            value = self.emit(ops.RELU, (value,), ())
        self.skip.update(chain)
        self.values[chain[-1]] = value

    def _function(self, node: fx.Node) -> None:
        target, args, kwargs = node.target, node.args, node.kwargs
        name = getattr(target, "__name__", str(target))
        if target is F.linear:
            weight, bias = _bound(("weight", "bias"), args, kwargs)
            names = self._names(weight, bias)
            op: Op | None = ops.Linear(len(names) == 2)
        elif target is F.layer_norm:
            shape, weight, bias, eps = _bound(("normalized_shape", "weight", "bias", "eps"), args, kwargs)
            refuse(not all(isinstance(size, int) for size in shape), "a LayerNorm of a computed shape")
            names = self._names(weight, bias)
            refuse(weight is None and bias is not None, "a LayerNorm of a bias alone")
            op = layers.layer_norm(shape, 1e-5 if eps is None else eps, weight is not None, bias is not None)
        elif target is F.dropout:
            p, training, inplace = _bound(("p", "training", "inplace"), args, kwargs)
            p, training = 0.5 if p is None else p, True if training is None else training
            refuse(not isinstance(p, float) or not isinstance(training, bool) or bool(inplace), "this dropout")
            self.values[node] = self._dropout(self._value(args[0]), p if training else 0.0, False)
            return
        elif target in _ADDS and not kwargs and len(args) == 2 and all(isinstance(a, fx.Node) for a in args):
            own = [a for a in args if isinstance(a, fx.Node) and a.op == "get_attr"]
            if len(own) != 1:
                self.values[node] = self.emit(ops.Add(), tuple(self._value(a) for a in args))
                return
            args = tuple(a for a in args if a is not own[0])
            op, names = ops.AddParameter(), (str(own[0].target),)
        else:
            op, names = self._plain(target, args, kwargs), ()
        if op is None:
            raise Unsupported(f"the call of {name} has no rule")
        self.values[node] = self.emit(op, (self._value(args[0]),), names)

    def _plain(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
        """What a call without parameters does to its first argument; None where no rule knows."""
        more = args[1:]
        if target in FUNCTIONS:
            refuse(bool(more) or bool(kwargs.get("inplace")), "an in-place activation")
            return ops.gelu(kwargs["approximate"]) if "approximate" in kwargs else FUNCTIONS[target]
        if target in (torch.flatten, "flatten"):
            start = more[0] if len(more) == 1 else kwargs.get("start_dim", 0)
            refuse(len(more) > 1 or "end_dim" in kwargs or not isinstance(start, int) or start < 0, "this flattening")
            return ops.Flatten(start)
        if target in (torch.squeeze, "squeeze") and (more == (-1,) or kwargs == {"dim": -1}):
            return ops.Squeeze()
        if target in (torch.mean, "mean") and set(kwargs) <= {"dim"} and len(more) + len(kwargs) == 1:
            dims = more[0] if more else kwargs["dim"]
            return ops.Mean((dims,) if isinstance(dims, int) else tuple(dims))
        if target in (operator.mul, torch.mul, operator.truediv, torch.div) and _numbers(more) and not kwargs:
            return ops.Scale(more[0] if target in (operator.mul, torch.mul) else 1 / more[0])
        if target is operator.getitem and isinstance(more[0], tuple) and more[0][:1] == (slice(None),):
            index = more[0][1:]
            return ops.Select(index[0]) if _numbers(index) and isinstance(index[0], int) else None
        return None

    def _names(self, *given: Any) -> tuple[str, ...]:
        """The names of parameters that are an argument of a function; None is no argument."""
        names = [str(part.target) for part in given if isinstance(part, fx.Node) and part.op == "get_attr"]
        refuse(len(names) != sum(part is not None for part in given), "a function of computed weights")
        return tuple(names)

    def _value(self, node: Any) -> int:
        if not isinstance(node, fx.Node) or node not in self.values:
            raise Unsupported("a layer reads something that is not a value of the network")
        return self.values[node]

    def emit(self, op: Op, inputs: tuple[int, ...], params: tuple[str, ...] = ()) -> int:
        for name in params:
            if name not in self.trainable:
                held: Tensor = operator.attrgetter(name)(self.model)
                refuse(held.requires_grad, f"parameter {name!r} is another layer's too")
                self.frozen[name] = held.detach()
                continue
            refuse(name in self.used, f"parameter {name!r} is used more than once")
            self.used.add(name)
        output = len(self.steps) + 1
        self.steps.append(Step(op, inputs, output, params))
        return output


def _bound(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """A function's arguments behind its input, None where there is none."""
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    return [given.get(name) for name in names]


def _numbers(given: Sequence[Any]) -> bool:
    return len(given) == 1 and isinstance(given[0], int | float) and not isinstance(given[0], bool)


_HARMLESS = (getattr, operator.getitem, "size", "dim")
"""Calls that change nothing, so that they may be left out where nobody reads what they give."""
_ADDS = (operator.add, torch.add, "add")
_SEQUENCES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)
