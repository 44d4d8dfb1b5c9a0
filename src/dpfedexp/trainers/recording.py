"""Tensor programs that are recorded once and replayed, so that a caller's Python code never runs on clients' data.

A module, a loss, a transform or an optimizer may keep state, share it or draw in ways that no check finds. In a secure run such
code runs on synthetic values only, which depend on public numbers alone. Its tensor operations are recorded there (`record`), and
the clients' data go through the recording (`Tape`): a fixed list of torch operations, the same for every client. A recording is
refused (`Unrecordable`) if it is not the whole program, or if replaying it could carry data from one client to another.
"""

import math
import operator
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, lru_cache
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from dpfedexp.core.modules import Inputs, each, leaves
from dpfedexp.errors import InputError, first_line


class Unrecordable(InputError):
    """Raised for a program that can't be recorded; the message completes a sentence that begins with the program's name."""


_REMEDIES = {
    "transform": "write it with torch operations, or apply it to the data before the federation is made",
    "writes": "freeze such a layer with .eval(), use GroupNorm for BatchNorm, and compute the rest from the batch alone",
    "looks at values": "use torch.where, masks and fixed shapes instead, or train without secure=True",
    "": "or train without secure=True",
}


def refusal(what: str, reason: Unrecordable) -> InputError:
    remedy = next(remedy for word, remedy in _REMEDIES.items() if word in f"{what} {reason}")
    why = "A secure run traces it on synthetic rows, so that no client's rows reach another client"
    return InputError(f"{what} {reason}. {why}: {remedy}.")


@dataclass(frozen=True)
class Tape:
    """A recorded program, with its constants as buffers of `program`: `tape(*inputs)` takes tensors of the recorded shapes."""

    program: fx.GraphModule
    outputs: TreeSpec

    def __call__(self, *inputs: Any) -> Any:
        # Some kernels depend on whether gradients are enabled, as they were during recording. No input requires a gradient.
        with torch.enable_grad():
            return tree_unflatten(self.program.forward(*tree_leaves(inputs)), self.outputs)

    def same(self, other: Self) -> bool:
        mine, theirs = (dict(tape.program.named_buffers()) for tape in (self, other))
        return (
            self.program.code == other.program.code
            and self.outputs == other.outputs
            and mine.keys() == theirs.keys()
            and all(same_bits(value, theirs[name]) for name, value in mine.items())
        )


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal; NaN in the same place of both counts as equal."""
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def record(
    function: Callable[..., Any],
    inputs: tuple[Any, ...],
    *,
    own: Iterable[Tensor] = (),
    held: Iterable[Tensor] = (),
    batched: bool = False,
) -> Tape:
    """Run a function once on synthetic inputs and return its tape. Raises `Unrecordable` if the tape would not be all of it.

    The function may write into its `own` inputs. Constants are copied, because other code may write into them later, unless only
    this run holds them (`held`). `batched` says that the function computes many clients under `vmap`.
    """
    recorder = _Recorder(tree_leaves(inputs), own, held, batched)
    try:
        with recorder:
            result = function(*inputs)
    except Unrecordable:
        raise
    except RuntimeError as error:
        if "data-dependent control flow" in str(error):
            raise Unrecordable(_DECIDES) from None
        raise
    return recorder.tape(result)


_DECIDES = "looks at values while it runs (.item(), bool() or an `if` on a tensor), so that they decide the computation"


class _Recorder(TorchDispatchMode):
    """A dispatch mode that sees every operation below autograd and vmap, and adds it to a graph."""

    def __init__(self, inputs: list[Any], own: Iterable[Tensor], held: Iterable[Tensor], batched: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph, self.root = fx.Graph(), nn.Module()
        self.nodes = WeakTensorKeyDictionary()
        self.writes: set[fx.Node] = set()
        self.made: set[int] = set()
        self.own, self.held = ({_memory(tensor) for tensor in tensors} - {0} for tensors in (own, held))
        self.batched = batched
        self.clients = inputs[0].shape[0] if batched and isinstance(inputs[0], Tensor) and inputs[0].dim() else 1
        self.bags: list[dict[str, Any]] = []
        self.before: list[tuple[Tensor, Tensor | None, int]] = []
        for number, value in enumerate(inputs):
            if not isinstance(value, Tensor):
                raise TypeError(f"a recording takes tensors, and was given a {type(value).__name__}.")
            self.nodes[value] = self.graph.placeholder(f"t{number}")
        # Memory that depends on the inputs. Tensors without memory of their own (0) count as dependent.
        self.depends = {0, *map(_memory, inputs)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        memory = {_memory(tensor) for tensor in _tensors((args, kwargs))}
        depends = not memory.isdisjoint(self.depends)
        given = _given(func, args, kwargs)
        _check_kernel(func)
        _check_draws(func, given)
        self._check_reads(func, args, depends)
        written = self._check_writes(func, given)
        args, kwargs = self._check_places(func, args, kwargs, given)
        read: Any = fx.node.map_aggregate(args, self._node)
        named: Any = fx.node.map_aggregate(kwargs, self._node)
        result = func(*args, **kwargs)
        outputs = {_memory(tensor) for tensor in _tensors(result)}
        self.bags = [bag for bag in self.bags if written.isdisjoint(map(_memory, _tensors(list(bag.values()))))]
        if func.overloadpacket.__name__ == "_embedding_bag":
            made = dict(zip(("output", "offset2bag", "bag_size", "maximum_indices"), result, strict=True))
            self.bags.append({**given, **made})
        if not outputs and not written:
            # A Python value of public constants, such as the number in a buffer.
            return result
        fresh = outputs - memory - {0}
        self.made |= fresh
        # Freed memory may be reused: whether fresh memory depends on inputs follows from the arguments alone.
        self.depends = self.depends | outputs | written if depends else self.depends - fresh
        name = func.overloadpacket.__name__
        node = self.graph.call_function(torch.ops.aten.clone.default if name in _FRESH else func, read, named)
        if written:
            self.writes.add(node)
        if name in _UNFILLED:
            node = self.graph.call_function(zeroed, (node,))
        several = isinstance(result, list | tuple)
        for number, value in enumerate(result if several else [result]):
            if isinstance(value, Tensor):
                # An operation may return its argument; for a constant this is a copy when the tape is replayed.
                part = self.graph.call_function(operator.getitem, (node, number)) if several else node
                self.nodes[value] = part
        return result

    def tape(self, result: Any) -> Tape:
        """The tape: all recorded operations that write, or on which an output depends, as a function of the inputs."""
        outputs, nested = tree_flatten(result)
        self.graph.output([self._node(value) for value in outputs])
        for tensor, bits, version in self.before:
            if tensor._version != version or (bits is not None and not same_bits(tensor, bits)):
                raise Unrecordable(_WRITES)
        self.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node in self.writes)
        return Tape(fx.GraphModule(self.root, self.graph), nested)

    def _node(self, value: Any) -> Any:
        """The graph node of a tensor; a tensor that no recorded operation made existed before and becomes a constant."""
        if not isinstance(value, Tensor):
            return value
        known = self.nodes.get(value)
        if known is not None:
            return known
        self.made.discard(_memory(value))
        constant = value.detach() if value.requires_grad else value
        copied = None if _memory(constant) in self.held else laid_out(constant, constant)
        name = f"c{len(self.before)}"
        self.root.register_buffer(name, constant if copied is None else copied)
        self.before.append((constant, copied, constant._version))
        self.nodes[value] = node = self.graph.get_attr(name)
        return node

    def _check_reads(self, func: Any, args: tuple[Any, ...], depends: bool) -> None:
        """Raise `Unrecordable` if a value of an input leaves torch or determines a shape."""
        if not depends:
            return
        name = func.overloadpacket.__name__
        chooses = name in ("index", "index_put", "index_put_", "_unsafe_index") and any(
            isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1] or ()
        )
        shapes = torch.Tag.dynamic_output_shape in func.tags and name not in ("index", "_unsafe_index")
        if torch.Tag.data_dependent_output in func.tags or chooses or shapes:
            raise Unrecordable(_DECIDES)

    def _check_writes(self, func: Any, given: dict[str, Any]) -> set[int]:
        """Return the memory that an operation writes; raises `Unrecordable` unless the pass or a client alone owns it."""
        name = func.overloadpacket.__name__
        if name == "set_" or "resize" in name or ("empty" in name and name not in _UNFILLED):
            raise Unrecordable(f"takes memory that is not filled, or another tensor's, with torch.{name}")
        written = [given.get(name) for name in _schema(func)[2]]
        if given.get("training") or given.get("train"):
            # These operations update their running statistics without saying so in their schema.
            written += [given.get("running_mean"), given.get("running_var")]
        places = {_memory(tensor) for tensor in _tensors(written)}
        if not places <= self.made | self.own:
            raise Unrecordable(_WRITES)
        return places

    def _check_places(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, with places that an operation would not check moved into the client's own tensor.

        Raises `Unrecordable` for operations that could read outside of a client's own tensors with some indices.
        """
        name = func.overloadpacket.__name__
        if name.startswith("as_strided") and _memory(args[0]) not in self.made:
            raise Unrecordable("reaches into memory by as_strided, which is not bound to one client's tensor")
        values = _tensors([value for key, value in given.items() if key in _PLACES])
        whole = {_memory(value) for value in values if not value.is_floating_point() and value.dtype != torch.bool}
        if whole.isdisjoint(self.depends) or bool(getattr(_in_range, "depth", 0)):
            return args, kwargs
        if name.removesuffix("_") not in _CHECKED | (frozenset() if self.batched else _CHECKED_ALONE):
            raise Unrecordable(
                f"takes places from the rows in torch.{name}, which does not check that they lie within one client's tensor; use "
                "an index (x[i]), gather, scatter or nn.Embedding"
            )
        if (
            not name.endswith("_backward")
            or name.removesuffix("_backward") in _NUMBERS
            or self._is_of_a_bag(name, given)
        ):
            return args, kwargs
        trusted = _trusted(name, given, self.clients)
        if trusted is None:
            raise Unrecordable(
                f"calls torch.{name} itself, which trusts that its forward operation made the places; leave gradients to autograd"
            )
        key, bounds = trusted
        # Autograd's own places are within the bounds. Those of a hook need not be, and nothing tells the two apart.
        inside = bounded(given[key], *bounds)
        self.nodes[inside] = self.graph.call_function(bounded, (self._node(given[key]), *bounds))
        self.depends.add(_memory(inside))
        position = _schema(func)[0].index(key)
        if position < len(args):
            return (*args[:position], inside, *args[position + 1 :]), kwargs
        return args, {**kwargs, key: inside}

    def _is_of_a_bag(self, name: str, given: dict[str, Any]) -> bool:
        """Whether an operation of the backward pass takes exactly what a recorded `_embedding_bag` took and made."""
        if name not in ("_embedding_bag_backward", "_embedding_bag_per_sample_weights_backward"):
            return False
        rows = given["weight"].shape[0] if "weight" in given else given["num_weights"]
        same = ("indices", "offsets", "offset2bag", "bag_size", "maximum_indices", "per_sample_weights")
        return any(
            (given["grad"].shape, rows) == (bag["output"].shape, bag["weight"].shape[0])
            and all(_place(given[key]) == _place(bag[key]) for key in same if key in given)
            for bag in self.bags
        )


def _place(tensor: Tensor | None) -> Any:
    """Where a tensor lies in memory: equal for a tensor and what autograd saved of it."""
    if tensor is None:
        return None
    return _memory(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _trusted(name: str, given: dict[str, Any], clients: int) -> tuple[str, tuple[int, int, int | None]] | None:
    """The argument whose places an operation of the backward pass trusts, and its bounds as `bounded` takes them."""
    if name in ("nll_loss_backward", "nll_loss2d_backward", "multi_margin_loss_backward"):
        return "target", (1, given["self"].shape[1 if "2d" in name else -1], given.get("ignore_index"))
    if "max_pool" in name:
        last = -3 if "3d" in name else -2
        indices, pooled = given["indices"].shape, given["self"].shape
        same = given["grad_output"].shape == indices and indices[:last] == pooled[:last]
        return ("indices", (1, math.prod(pooled[last:]), None)) if same else None
    if name == "embedding_dense_backward" and (clients == 1 or given["indices"].shape[:1] == (clients,)):
        return "indices", (clients, given["num_weights"] // clients, None)
    return None


def bounded(places: Tensor, clients: int, size: int, kept: int | None) -> Tensor:
    """Move places into each client's own `size` places; with several clients the first dimension is theirs. `kept` stays."""
    first = torch.arange(clients, device=places.device).view(-1, *(1,) * (places.dim() - 1)) * size
    inside = places.clamp(first, first + (size - 1)) if clients > 1 else places.clamp(0, size - 1)
    return inside if kept is None else torch.where(places == kept, places, inside)


_PLACES = {
    *("index", "indices", "target", "targets", "offsets"),
    *("lengths", "input_lengths", "target_lengths", "batch_sizes"),
}
"""Names of arguments in torch's schemas that are indices."""
_NUMBERS = frozenset(
    {"binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "huber_loss", "smooth_l1_loss"}
    | {"soft_margin_loss"}
)
"""Losses whose targets are numbers and not places."""
_CHECKED = frozenset(
    f"{name}{way}"
    for name in (
        *("index", "index_put", "index_select", "index_add", "index_copy", "index_reduce", "gather", "take", "put"),
        *("scatter", "scatter_add", "scatter_reduce", "nll_loss", "nll_loss2d", "multi_margin_loss", "embedding_dense"),
        *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d", "adaptive_max_pool3d"),
        *("max_unpool2d", "max_unpool3d", "fractional_max_pool2d", "fractional_max_pool3d", *_NUMBERS),
        *("sort", "kthvalue", "topk", "cummax", "cummin", "value_selecting_reduction"),
    )
    for way in ("", "_forward", "_backward")
)
"""Operations that check their indices against a client's own tensor also under `vmap`, or that take numbers and no indices.

Those of the backward pass do not; `bounded` and `_is_of_a_bag` do it for them."""
_CHECKED_ALONE = frozenset(
    {"embedding", "index_fill", "_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_backward"}
    | {"_embedding_bag_dense_backward", "_embedding_bag_per_sample_weights_backward", "embedding_renorm"}
)
"""Operations that check their indices for a single client only: under `vmap` they would read another client's rows."""
_in_range: Any = threading.local()


@contextmanager
def in_range() -> Iterator[None]:
    """A context in which a recording accepts every index, because the caller has clamped indices to the client's own tensor."""
    _in_range.depth = getattr(_in_range, "depth", 0) + 1
    try:
        yield
    finally:
        _in_range.depth -= 1


_WRITES = (
    "writes into a tensor that outlives the pass (a buffer, a cache, a shared or frozen parameter), which would carry one client's "
    "data to the others"
)
_UNFILLED = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
"""Operations whose memory may contain another client's numbers; it is filled with zeros when the tape is replayed."""
_FRESH = frozenset({"lift_fresh", "lift", "lift_fresh_copy"})
"""Operations on tensors that Python code creates in every pass; a replay copies the constant instead."""


def zeroed(tensor: Tensor) -> Tensor:
    """Fill all memory of a tensor with zeros, including gaps between the numbers of a strided tensor, and return it."""
    torch.tensor([], dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage()).zero_()
    return tensor


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names, defaults, _ = _schema(func)
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


@cache
def _schema(func: Any) -> tuple[list[str], dict[str, Any], list[str]]:
    """The names of an operation's arguments, their defaults by name, and the names of arguments that it writes."""
    schema = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    written = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
    return [argument.name for argument in schema], defaults, written


def _tensors(value: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results, also in nested lists and dicts."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> int:
    """An identifier of a tensor's memory; 0 for a tensor without memory of its own, such as a sparse tensor."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):
        return 0


def _check_kernel(func: Any) -> None:
    """Raise `Unrecordable` for operations that are not torch's own: a custom operator is the caller's code and may keep state."""
    space, name = func._schema.name.split("::")
    overridden = (f"{space}/{name}", f"{space}/{name}.{func._overloadname}")
    replaced = _replaced(len(torch.library._impls))
    if space not in ("aten", "mkldnn", "onednn") or not replaced.isdisjoint(overridden):
        raise Unrecordable(f"calls {space}::{name}, which is not an operation of torch's own")


@lru_cache(maxsize=2)
def _replaced(count: int) -> frozenset[str]:
    """Operations whose kernels Python code has replaced; `count` is the number of such kernels, a key of the cache."""
    return frozenset(entry.rpartition("/")[0] for entry in torch.library._impls if entry.endswith(_REPLAYED))


_REPLAYED = ("/CPU", "/CompositeExplicitAutograd", "/CompositeImplicitAutograd", "/BackendSelect", "/AutogradCPU")
"""Dispatch keys of kernels that a replay could reach. Torch itself registers other kernels from Python, for shapes and `vmap`."""


def _check_draws(func: Any, given: dict[str, Any]) -> None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return
    shares = [given[name] for name in ("dropout_p", "p", "dropout") if name in given]
    if shares and (not shares[0] or given.get("train") is False):
        return
    raise Unrecordable(
        f"draws random numbers with torch.{func.overloadpacket.__name__}, which does not draw from a client's own key; use "
        "torch.rand, randn, randint, randperm, normal, bernoulli or dropout, without a generator"
    )


_USES = 12


@dataclass(eq=False)
class Recorded:
    """A program that is replayed from a tape for each shape of its inputs; calls may come from several threads.

    `synthetic` makes values of the same shapes, and the program runs on these only: a new shape is recorded on them, and the real
    inputs go through the tape. Without `synthetic`, tapes are for speed only: a shape that was used twelve times is recorded, up to
    `keep` shapes. `own`, `held` and `batched` are those of `record`.
    """

    program: Callable[..., Any]
    synthetic: Callable[[tuple[Any, ...]], tuple[Any, ...]] | None = None
    own: Callable[[tuple[Any, ...]], Iterable[Tensor]] = lambda inputs: ()
    _: KW_ONLY
    held: Callable[[], Iterable[Tensor]] = lambda: ()
    batched: bool = False
    keep: int = 32
    uses: Counter[Any] = field(default_factory=Counter)
    tapes: dict[Any, Tape] = field(default_factory=dict)
    refused: dict[Any, InputError] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, *inputs: Any) -> Any:
        tensors, spec = tree_flatten(inputs)
        # A tape contains `view`s that are valid for one memory layout only.
        key = (*((part.shape, part.stride(), part.dtype, part.device) for part in tensors), str(spec))
        tape = self.tapes.get(key)
        if tape is not None:
            return tape(*inputs)
        if self.synthetic is not None:
            with self.lock:
                if key in self.refused:
                    raise self.refused[key]
                if key not in self.tapes:
                    try:
                        self.tapes[key] = self.record(self.synthetic(inputs))
                    except (MemoryError, torch.OutOfMemoryError):
                        raise
                    except Exception as error:
                        why = f"fails on synthetic rows ({first_line(error)})"
                        # Remembered: how often the caller's code runs must not depend on the clients' shapes.
                        self.refused[key] = error if isinstance(error, InputError) else Unrecordable(why)
                        raise self.refused[key] from error
            return self.tapes[key](*inputs)
        self.uses[key] += 1
        if self.uses[key] > _USES and len(self.tapes) < self.keep:
            with self.lock:
                try:
                    self.tapes[key] = self.record(inputs)
                except Unrecordable:
                    self.keep = 0
        return self.program(*inputs)

    def record(self, inputs: tuple[Any, ...]) -> Tape:
        """Record the tape for the shapes of these inputs, which are not changed."""
        copied = tree_map(lambda value: laid_out(value, value), inputs)
        return record(self.program, copied, own=self.own(copied), held=self.held(), batched=self.batched)


def laid_out(values: Tensor, like: Tensor) -> Tensor:
    """Copy values to the type, device and memory layout of `like`, a tensor of the same shape."""
    if any(stride == 0 and size > 1 for size, stride in zip(like.shape, like.stride(), strict=True)):
        return values.to(like.device, like.dtype, copy=True)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).copy_(values)


_MOST_ROWS, _MOST_NUMBERS = 1024, 2**22
"""Limits of the rows that synthetic clients share: enough rows that all differ, and fewer if a row is large."""
_EXTREME = 1e4
T = TypeVar("T")


class SyntheticClients:
    """Clients with `sizes` rows of the shapes and types of `like`, from public numbers alone; whole numbers are below `tokens`."""

    def __init__(
        self, like: tuple[Inputs, Tensor], sizes: Tensor, transform: Callable[[Any], Any] | None = None, tokens: int = 2
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        self.sizes, self.transform, self.tokens = sizes, transform, tokens
        self.rows = max(16, min(_MOST_ROWS, _MOST_NUMBERS // max(1, sum(part.numel() for part in leaves(like[0])))))
        self.inputs = each(lambda row: _drawn((self.rows, *row.shape), row, generator, tokens, torch.randn), like[0])
        # Targets between 0 and 1 suit every loss for floating-point targets, probabilities included.
        self.targets = _drawn((self.rows, *like[1].shape), like[1], generator, tokens, torch.rand)

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, clients: Tensor, positions: Tensor, device: torch.device | None = None) -> tuple[Inputs, Tensor]:
        at = (clients.cpu()[:, None] * 7919 + positions.cpu()) % self.rows
        return each(lambda rows: rows[at].to(device), self.inputs), self.targets[at].to(device)


def _drawn(
    shape: Sequence[int], like: Tensor, generator: torch.Generator, tokens: int, draw: Callable[..., Tensor]
) -> Tensor:
    if like.is_floating_point():
        return draw(shape, generator=generator).to(like.dtype)
    return torch.randint(0, tokens, shape, generator=generator).to(like.dtype)


def adversarial(x: Inputs, y: Tensor, words: int, labels: int) -> list[tuple[Inputs, Tensor]]:
    """Batches [s, …] with very large and very small values, zeros, one repeated row, and every known word and label."""

    def whole(value: Tensor, most: int, first: int) -> Tensor:
        return ((torch.arange(value.numel(), device=value.device) + first) % most).view(value.shape).to(value.dtype)

    def sets(value: Tensor, most: int, factor: float) -> Tensor:
        return value * factor if value.is_floating_point() else whole(value, most, int(factor))

    def scaled(by: float) -> tuple[Inputs, Tensor]:
        return each(lambda value: sets(value, words, by), x), y if y.is_floating_point() else whole(y, labels, int(by))

    found = [scaled(by) for by in (_EXTREME, -1 / _EXTREME, 0.0, 3.0)]
    return [*found, (each(lambda value: value[:1].expand_as(value).clone(), x), y[:1].expand_as(y).clone())]


class Synthetic:
    """The recorded programs of a run, shared by its trainers, and the synthetic values (integers below `tokens`) to record on."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.programs: dict[str, Any] = {}

    def program(self, name: str, make: Callable[[], T]) -> T:
        if name not in self.programs:
            self.programs[name] = make()
        return cast(T, self.programs[name])

    def like(self, values: Any) -> Any:
        """Values of the same shapes, layouts and types: uniform on [0, 1), or whole numbers below `tokens`."""
        generator = torch.Generator().manual_seed(0)
        return tree_map(
            lambda value: laid_out(_drawn(value.shape, value, generator, self.tokens, torch.rand), value), values
        )
