"""Translation of an nn.Module into a `Program`, if there is a rule for every layer that it calls."""

import copy
import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from dpfedexp.trainers.fast import ops
from dpfedexp.trainers.fast.convolution import Contract, ContractAndPool, Pair, Patches, Window
from dpfedexp.trainers.fast.ops import INPUT, KEYS, Function, Op, Unsupported, by_sample, refuse
from dpfedexp.trainers.fast.program import Program, ProgramStep

Emitted = Sequence[tuple[Op, Sequence[str]]]
Rule = Callable[[Any], Emitted]
"""From a layer to its operations, each with the names of the layer's parameters that it uses."""


def _pair(value: Any) -> Pair:
    return (int(value), int(value)) if isinstance(value, int) else (int(value[0]), int(value[1]))


def named(layer: nn.Module, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(layer, name) is not None)


def window_of(layer: nn.Conv2d) -> Window:
    refuse(layer.groups != 1, "a grouped convolution")
    refuse(layer.padding_mode != "zeros" or isinstance(layer.padding, str), "this kind of padding")
    return Window(_pair(layer.kernel_size), _pair(layer.stride), _pair(layer.padding), _pair(layer.dilation))


def _group_norm(layer: nn.GroupNorm) -> Emitted:
    refuse(layer.affine and layer.bias is None, "a GroupNorm without bias")
    return [(ops.GroupNorm(layer.num_groups, layer.eps), ("weight", "bias") if layer.affine else ())]


def _embedding(layer: nn.Embedding) -> Emitted:
    own_gradient = layer.padding_idx is not None or layer.scale_grad_by_freq or layer.sparse
    refuse(layer.max_norm is not None or (own_gradient and layer.weight.requires_grad), "an Embedding with options")
    return [(ops.Embedding(), ("weight",))]


def _flatten(layer: nn.Flatten) -> Emitted:
    refuse(layer.start_dim < 0 or layer.end_dim != -1, "flattening some dimensions only")
    return [(Function(partial(ops.flattened, start=layer.start_dim)), ())]


FUNCTIONS: dict[Any, Callable[..., Tensor]] = {
    **dict.fromkeys((F.relu, torch.relu, "relu"), torch.relu),
    **dict.fromkeys((F.tanh, torch.tanh, "tanh"), torch.tanh),
    **dict.fromkeys((F.sigmoid, torch.sigmoid, "sigmoid"), torch.sigmoid),
    **{function: function for function in (F.silu, F.gelu)},
}
"""Activations that a module calls without a layer, as functions or as tensor methods."""


def _pool(layer: nn.MaxPool2d | nn.AvgPool2d) -> Emitted:
    names = ("dilation",) if isinstance(layer, nn.MaxPool2d) else ("count_include_pad", "divisor_override")
    refuse(bool(getattr(layer, "return_indices", False)), "a max-pool with indices")
    given = {name: getattr(layer, name) for name in ("kernel_size", "stride", "padding", "ceil_mode", *names)}
    return [(by_sample(partial(F.max_pool2d if isinstance(layer, nn.MaxPool2d) else F.avg_pool2d, **given)), ())]


RULES: dict[type[nn.Module], Rule] = {
    nn.GroupNorm: _group_norm,
    nn.Embedding: _embedding,
    nn.Flatten: _flatten,
    **dict.fromkeys((nn.AvgPool2d, nn.MaxPool2d), _pool),
    nn.ReLU: lambda layer: [(Function(torch.relu), ())],
    nn.Tanh: lambda layer: [(Function(torch.tanh), ())],
    nn.Sigmoid: lambda layer: [(Function(torch.sigmoid), ())],
    nn.SiLU: lambda layer: [(Function(F.silu), ())],
    nn.Linear: lambda layer: [(ops.Linear(layer.bias is not None), named(layer, "weight", "bias"))],
    nn.Conv2d: lambda layer: [
        (Patches(window_of(layer)), ()),
        (Contract(layer.bias is not None), named(layer, "weight", "bias")),
    ],
    nn.LayerNorm: lambda layer: [
        (Function(partial(ops.normalized, shape=layer.normalized_shape, eps=layer.eps)), named(layer, "weight", "bias"))
    ],
    nn.GELU: lambda layer: [(Function(partial(F.gelu, approximate=layer.approximate)), ())],
    nn.LeakyReLU: lambda layer: [(Function(partial(F.leaky_relu, negative_slope=layer.negative_slope)), ())],
    nn.AdaptiveAvgPool2d: lambda layer: [
        (by_sample(partial(F.adaptive_avg_pool2d, output_size=layer.output_size)), ())
    ],
    nn.Identity: lambda layer: [],
}
"""The rule of each layer type; it does not cover subclasses, which may compute something else."""


def _pool_size(layer: nn.MaxPool2d) -> Pair | None:
    """The window of a max-pool whose windows do not overlap, None for any other max-pool."""
    size = _pair(layer.kernel_size)
    plain = layer.stride in (None, layer.kernel_size, size) and _pair(layer.padding) == (0, 0) and not layer.ceil_mode
    return size if plain and _pair(layer.dilation) == (1, 1) and not layer.return_indices else None


def compile_module(model: nn.Module, trainable: Sequence[str]) -> Program:
    """Translate a module into a program; raises `Unsupported` with the reason if that is not possible."""
    for name, module in model.named_modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        refuse(any(hooks), f"hooks on layer {name!r}")
    # Tracing modifies a module, so it is done on a copy that shares the parameters and buffers.
    held: dict[int, Any] = {id(part): part for part in (*model.parameters(), *model.buffers())}
    traced = copy.deepcopy(model, held)
    try:
        graph = _Tracer().trace(traced)
    except Exception as error:
        raise Unsupported(f"the module can't be traced ({type(error).__name__})") from error
    graph.eliminate_dead_code(lambda node: node.op != "get_attr" and node.target not in _HARMLESS)
    for node in graph.nodes:
        unread = not node.users and node.op != "output"
        refuse(unread, f"nothing reads what {node.name!r} gives, which may change something")
        made = node.op == "get_attr" and not hasattr(model, str(node.target).split(".")[0])
        refuse(made, "a tensor made in `forward`")
    return _Translation(model, graph, frozenset(trainable)).program()


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in RULES or super().is_leaf_module(m, module_qualified_name)


@dataclass
class _Translation:
    model: nn.Module
    graph: fx.Graph
    trainable: frozenset[str]
    steps: list[ProgramStep] = field(default_factory=list)
    values: dict[fx.Node, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    frozen: dict[str, Tensor] = field(default_factory=dict)
    skip: set[fx.Node] = field(default_factory=set)
    calls: int = 0

    def program(self) -> Program:
        *nodes, last = self.graph.nodes
        for node in nodes:
            if node in self.skip or node.op == "get_attr":
                continue
            if node.op == "placeholder":
                refuse(INPUT in self.values.values(), "a module with several inputs")
                self.values[node] = INPUT
            elif node.op == "call_module":
                self._module(node)
            else:
                self._function(node)
        refuse(not isinstance(last.args[0], fx.Node), "a module with several outputs")
        output = self._value(last.args[0])
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
            self._pooled_conv(layer, name, value, *pooled)
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
        """Translate attention or an encoder; besides the sequence it may get only a constant mask."""
        given = inspect.signature(type(layer).forward).bind(layer, *node.args, **node.kwargs)
        given.apply_defaults()
        asked = given.arguments
        padding = asked.get("key_padding_mask", asked.get("src_key_padding_mask"))
        refuse(padding is not None, f"layer {name!r} takes a mask of padding")
        mask = next(asked[part] for part in ("attn_mask", "src_mask", "mask") if part in asked)
        bias = None
        if mask is not None:
            refuse(not isinstance(mask, fx.Node) or mask.op != "get_attr", "a mask that is computed")
            held: Tensor = operator.attrgetter(str(mask.target))(self.model)
            refuse(held.requires_grad, f"parameter {str(mask.target)!r} is a mask")
            bias = _as_bias(held)
        if isinstance(layer, nn.TransformerEncoderLayer):
            return self._encoder_layer(name, layer, self._value(asked["src"]), bias)
        if isinstance(layer, nn.TransformerEncoder):
            value = self._value(asked["src"])
            for number, part in enumerate(layer.layers):
                refuse(type(part) is not nn.TransformerEncoderLayer, f"layer {name!r} has layers of its own")
                value = self._encoder_layer(f"{name}.layers.{number}", part, value, bias)
            return value if layer.norm is None else self.layer(f"{name}.norm", value)
        refuse(not asked["query"] is asked["key"] is asked["value"], f"layer {name!r} attends to something else")
        weights = {user for user in node.users if user.target is not operator.getitem or user.args[1] != 0}
        refuse(bool(weights), f"layer {name!r} gives its weights to another layer")
        value = self._attention(name, layer, self._value(asked["query"]), bias)
        self.values.update(dict.fromkeys(node.users, value))
        self.skip.update(node.users)
        return value

    def _attention(self, name: str, layer: nn.MultiheadAttention, value: int, bias: Tensor | None) -> int:
        refuse(not layer.batch_first, f"layer {name!r} (MultiheadAttention) does not have the batch first")
        packed = layer.in_proj_weight is not None and layer.bias_k is None and not layer.add_zero_attn
        dropped = layer.training and layer.dropout > 0
        refuse(not packed or dropped, f"layer {name!r} (MultiheadAttention) has options")
        projections = named(layer, "in_proj_weight", "in_proj_bias")
        value = self.emit(ops.Linear(len(projections) == 2), (value,), tuple(f"{name}.{part}" for part in projections))
        value = self.emit(Function(partial(ops.attended, heads=layer.num_heads, bias=bias)), (value,))
        out = tuple(f"{name}.out_proj.{part}" for part in named(layer.out_proj, "weight", "bias"))
        return self.emit(ops.Linear(len(out) == 2), (value,), out)

    def _encoder_layer(self, name: str, layer: nn.TransformerEncoderLayer, value: int, bias: Tensor | None) -> int:
        def attended(x: int) -> int:
            return self.layer(f"{name}.dropout1", self._attention(f"{name}.self_attn", layer.self_attn, x, bias))

        def transformed(x: int) -> int:
            x = self.layer(f"{name}.linear1", x)
            if isinstance(layer.activation, nn.Module):
                x = self.layer(f"{name}.activation", x)
            else:
                refuse(layer.activation not in FUNCTIONS, f"layer {name!r} has an activation without a rule")
                x = self.emit(Function(FUNCTIONS[layer.activation]), (x,))
            return self.layer(f"{name}.dropout2", self.layer(f"{name}.linear2", self.layer(f"{name}.dropout", x)))

        for part, norm in ((attended, f"{name}.norm1"), (transformed, f"{name}.norm2")):
            if layer.norm_first:
                value = self.emit(Function(ops.added), (value, part(self.layer(norm, value))))
            else:
                value = self.layer(norm, self.emit(Function(ops.added), (value, part(value))))
        return value

    def _dropout(self, value: int, p: float, channels: bool) -> int:
        if p <= 0:
            return value
        self.calls += 1
        return self.emit(ops.Dropout(p, self.calls, channels), (value, KEYS))

    def _pool_behind(self, node: fx.Node) -> tuple[list[fx.Node], Pair] | None:
        """The chain [ReLU …, MaxPool2d] that alone reads this convolution, since ReLU and max commute; None if there is none."""
        chain: list[fx.Node] = []
        at = node
        while len(at.users) == 1:
            (at,) = at.users
            chain.append(at)
            layer = self.model.get_submodule(str(at.target)) if at.op == "call_module" else None
            if type(layer) is nn.MaxPool2d:
                size = _pool_size(layer)
                return None if size is None else (chain, size)
            if type(layer) is not nn.ReLU and not (at.op == "call_function" and at.target in (F.relu, torch.relu)):
                return None
        return None

    def _pooled_conv(self, layer: nn.Conv2d, name: str, value: int, chain: list[fx.Node], pool: Pair) -> None:
        window = window_of(layer)
        value = self.emit(Patches(window.pooled(pool)), (value,), ())
        names = tuple(f"{name}.{part}" for part in named(layer, "weight", "bias"))
        value = self.emit(ContractAndPool(window, pool, layer.bias is not None), (value,), names)
        if len(chain) > 1:
            value = self.emit(Function(torch.relu), (value,), ())
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
            op = Function(partial(ops.normalized, shape=tuple(shape), eps=1e-5 if eps is None else eps))
        elif target is F.dropout:
            p, training, inplace = _bound(("p", "training", "inplace"), args, kwargs)
            p, training = 0.5 if p is None else p, True if training is None else training
            refuse(not isinstance(p, float) or not isinstance(training, bool) or bool(inplace), "this dropout")
            self.values[node] = self._dropout(self._value(args[0]), p if training else 0.0, False)
            return
        elif target in _ADDS and not kwargs and len(args) == 2 and all(isinstance(a, fx.Node) for a in args):
            own = [a for a in args if isinstance(a, fx.Node) and a.op == "get_attr"]
            if len(own) != 1:
                self.values[node] = self.emit(Function(ops.added), tuple(self._value(a) for a in args))
                return
            args = tuple(a for a in args if a is not own[0])
            op, names = Function(ops.with_parameter), (str(own[0].target),)
        else:
            op, names = self._plain(target, args, kwargs), ()
        if op is None:
            raise Unsupported(f"the call of {name} has no rule")
        self.values[node] = self.emit(op, (self._value(args[0]),), names)

    def _plain(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Op | None:
        """The operation of a call without parameters on its first argument; None if there is no rule."""
        more = args[1:]
        if target in FUNCTIONS:
            refuse(bool(more) or bool(kwargs.get("inplace")), "an in-place activation")
            given = {key: value for key, value in kwargs.items() if key != "inplace"}
            return Function(partial(FUNCTIONS[target], **given))
        if target in (torch.flatten, "flatten"):
            start = more[0] if len(more) == 1 else kwargs.get("start_dim", 0)
            refuse(len(more) > 1 or "end_dim" in kwargs or not isinstance(start, int) or start < 0, "this flattening")
            return Function(partial(ops.flattened, start=start))
        if target in (torch.squeeze, "squeeze") and (more == (-1,) or kwargs == {"dim": -1}):
            return by_sample(partial(torch.squeeze, dim=-1))
        if target in (torch.mean, "mean") and set(kwargs) <= {"dim"} and len(more) + len(kwargs) == 1:
            return by_sample(partial(torch.mean, dim=more[0] if more else kwargs["dim"]))
        if target in (operator.mul, torch.mul, operator.truediv, torch.div) and _numbers(more) and not kwargs:
            return Function(lambda x: target(x, more[0]))
        if target is operator.getitem and isinstance(more[0], tuple) and more[0][:1] == (slice(None),):
            index = more[0][1:]
            return by_sample(lambda x: x[:, index[0]]) if _numbers(index) and isinstance(index[0], int) else None
        return None

    def _names(self, *given: Any) -> tuple[str, ...]:
        """The names of parameters that are arguments of a function; None is skipped."""
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
        self.steps.append(ProgramStep(op, inputs, output, params))
        return output


def _bound(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """A function's arguments after its input, None for those that are not given."""
    given = dict(zip(names, args[1:], strict=False)) | kwargs
    return [given.get(name) for name in names]


def _numbers(given: Sequence[Any]) -> bool:
    return len(given) == 1 and isinstance(given[0], int | float) and not isinstance(given[0], bool)


_HARMLESS = (getattr, operator.getitem, "size", "dim")
"""Calls without side effects, which are removed if their results are not used."""
_ADDS = (operator.add, torch.add, "add")
_SEQUENCES = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


def _as_bias(mask: Tensor) -> Tensor:
    """An attention mask as numbers to add to the scores; booleans are True where attention is forbidden."""
    refuse(mask.dim() != 2, "a mask of another shape than one sequence's")
    bias = mask.detach()
    if mask.dtype == torch.bool:
        bias = torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, -torch.inf)
    refuse(bool((bias == -torch.inf).all(1).any()), "a mask that leaves a position nothing to look at")
    return bias
