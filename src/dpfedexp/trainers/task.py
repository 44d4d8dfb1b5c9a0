"""The task of every client, and the interface of trainers."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Literal, Protocol, Self, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from dpfedexp.core.local_optimizer import AdamW, LocalOptimizer, Schedule, Sgd
from dpfedexp.core.losses import Loss, check_labels, check_loss, output_warning
from dpfedexp.core.modules import Inputs, Layout, Params, arguments, call, each, in_float, leaves, shape_of
from dpfedexp.core.noise import Streams
from dpfedexp.data.federation import Federation
from dpfedexp.errors import InputError, first_line, require, warn
from dpfedexp.trainers import draws
from dpfedexp.trainers.draws import Drawing, ModuleTraits, client_keys, seeded_generators
from dpfedexp.trainers.module_checks import StateCheck
from dpfedexp.trainers.per_client import ClientOptimizer, ClientTransform
from dpfedexp.trainers.recording import Recorded, Synthetic, SyntheticClients, laid_out

Precision = Literal["fp32", "tf32", "bf16"]
"""The floating-point precision of local training.

fp32  every product and sum in float32, also on a GPU, where torch would otherwise let convolutions round their factors
tf32  a GPU's matrix units round the factors of products to 10 bits of fraction, a relative error of about 5·10⁻⁴ each; sums are
      float32. A CPU has no such units and computes as fp32
bf16  values, gradients and products in bfloat16 (7 bits of fraction, 4·10⁻³), sums in float32; the parameters that the steps move,
      and everything from clipping on, stay float32 or better, so that no privacy statement depends on the precision
"""
Rows = Tensor | None
"""One row or number for each client of a chunk, or None."""
Read = Callable[[int], tuple[Inputs, Tensor]]
"""A function from a step to inputs and targets."""


class Clients(Protocol):
    """The interface of a federation that the simulator needs.

    `gather` returns a client's rows without the transform. If there is an attribute `transform`, trainers apply it to each
    client's rows alone.
    """

    def __len__(self) -> int: ...

    @property
    def sizes(self) -> Tensor: ...

    def gather(
        self, clients: Tensor, positions: Tensor, device: torch.device | None = None
    ) -> tuple[Inputs, Tensor]: ...


@dataclass(frozen=True)
class Task:
    """The task of every client: model, loss, local steps and device.

    `state_check` is the allowed state of the module, `copies` are the modules that train besides `model`, and `has_client_rates`
    says that every call of a trainer passes the clients' rates. With `synthetic`, as in a secure run, module, loss, transform and
    optimizer are recorded on synthetic values, and no code of the caller runs on a client's rows.
    """

    model: nn.Module
    layout: Layout
    loss: Loss
    local: LocalOptimizer
    clients: Clients
    device: torch.device
    precision: Precision = "fp32"
    state_check: StateCheck | None = None
    copies: list[nn.Module] = field(default_factory=list)
    has_client_rates: bool = False
    synthetic: Synthetic | None = None

    @property
    def shapes_by_class(self) -> bool:
        """Whether shapes of an isolated run follow from the clients' `size_class`. On a GPU every shape needs a CUDA graph."""
        return self.local.max_examples is not None and self.device.type == "cpu"

    def copy_for_thread(self) -> Self:
        """Copy the task with its own module, for another thread; frozen parameters are shared."""
        frozen: dict[int, object] = {id(p): p for p in self.model.parameters() if not p.requires_grad}
        self.copies.append(copy.deepcopy(self.model, frozen))
        twin = replace(self, model=self.copies[-1])
        vars(twin)["module_traits"] = self.module_traits
        return twin

    def look(self) -> Callable[[], None]:
        """Check that only parameters leave a round: the returned function raises `InputError` if a module has kept state."""
        # In a secure run no module has seen a client's rows.
        state_check = self.state_check if self.synthetic is None else None
        judges = [] if state_check is None else [state_check.look(module) for module in (self.model, *self.copies)]

        def judge() -> None:
            for each_of_them in judges:
                each_of_them()

        return judge

    def losses(self, params: Params, x: Inputs, y: Tensor, key: Tensor | None = None) -> Tensor:
        """One loss per example of one client, in float32; `key` is the source of the module's random draws."""
        if self.precision == "bf16":
            params = self._rounded_constants() | {name: value.bfloat16() for name, value in params.items()}
        looked_after = key is not None or self.module_traits.fused or self.synthetic is not None
        with Drawing(key) if looked_after else nullcontext():
            given = arguments(each(lambda value: low(value, self.precision), x))
            outputs = functional_call(self.model, params, *given, tie_weights=self.tied)
            return self.loss(in_float(outputs) if self.precision == "bf16" else outputs, y)

    def _rounded_constants(self) -> Params:
        """Frozen parameters and buffers in bf16, copied for every pass, so that a module's writes reach no other client."""
        frozen = ((name, value) for name, value in self.model.named_parameters() if not value.requires_grad)
        still = {**dict(frozen), **dict(self.model.named_buffers())}
        return {name: value.detach().bfloat16() for name, value in still.items() if value.is_floating_point()}

    @cached_property
    def module_traits(self) -> ModuleTraits:
        """The traits of the module, tested on rows of zeros, so that no client's values matter; shared by a secure run's tasks."""

        def seen() -> ModuleTraits:
            with torch.random.fork_rng(devices=[]):
                x, _ = pair_of_clients(self)
            return draws.module_traits(copy.deepcopy(self.model), each(lambda value: torch.zeros_like(value[0]), x))

        return seen() if self.synthetic is None else self.synthetic.program("module traits", seen)

    def keys(self, streams: Streams | None, round: int, clients: Tensor) -> Tensor | None:
        """The keys of the clients' random draws in a round, [n]; None for a module that draws nothing."""
        if not self.module_traits.draws:
            return None
        if streams is None:
            raise InputError("the model draws random numbers, so its trainer needs the run's streams.")
        return client_keys(streams, round, clients, self.device)

    def arithmetic(self) -> AbstractContextManager[None]:
        return arithmetic(self.precision, self.device, same=self.synthetic is not None)

    @cached_property
    def optimizer(self) -> LocalOptimizer:
        """The clients' optimizer. In a secure run a custom one is wrapped so that it acts on each client alone."""
        synthetic = self.synthetic
        if synthetic is None or type(self.local) in (Sgd, AdamW):
            return self.local
        own = synthetic.program(f"optimizer {self.local}", lambda: ClientOptimizer(self.local, synthetic))
        return cast(LocalOptimizer, own)

    def program(self, name: str, program: Callable[..., Any], *, batched: bool = False, keep: int = 32) -> Recorded:
        """Wrap a program of parameters, inputs, targets, weights and perhaps keys, for one client or many.

        In a secure run it is recorded on synthetic values, once for all trainers; otherwise it is recorded for speed.
        """
        if self.synthetic is None:
            return Recorded(program, keep=keep)
        # Each client has its own copy of the parameters.
        make = partial(Recorded, program, self._stand_ins, lambda inputs: inputs[0].values(), batched=batched)
        return self.synthetic.program(f"{name}, {self.precision}", partial(make, held=self.module_tensors))

    def module_tensors(self) -> list[Tensor]:
        """The module's parameters and buffers, which no other code holds in a secure run."""
        return [*self.model.parameters(), *self.model.buffers()]

    def _stand_ins(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Synthetic inputs for recording a program: the model's initial parameters, and synthetic values for the rest."""
        params, *rest = inputs
        start = self.layout.unflatten(self.layout.read(self.model).float().to(self.device))
        own = {name: laid_out(start[name].expand_as(value), value) for name, value in params.items()}
        return own, *cast(Synthetic, self.synthetic).like(rest)

    @cached_property
    def client_transform(self) -> ClientTransform | None:
        """The federation's transform, None if it has none; a secure run shares it among its trainers and trials."""
        transform, synthetic = getattr(self.clients, "transform", None), self.synthetic
        if transform is None:
            return None
        make = partial(ClientTransform, transform, synthetic)
        return make() if synthetic is None else synthetic.program("transform", make)

    def row_reader(self, clients: Tensor, positions: Tensor, streams: Streams, round: int) -> Read:
        """A function: step k to examples `positions[i, k]` of client `clients[i]`, transformed with draws from `streams`."""
        read, transform = self.held(clients, positions, streams, round), self.client_transform
        if transform is None:
            return read
        keys = client_keys(streams, round, clients, self.device, "transform")

        def transformed(step: int) -> tuple[Inputs, Tensor]:
            x, y = read(step)
            return transform(x, draws.step_keys(keys, torch.tensor(step, device=self.device))), y

        return transformed

    def gather(self, clients: Tensor, positions: Tensor, streams: Streams | None = None) -> tuple[Inputs, Tensor]:
        """Rows `positions[i]` of client `clients[i]`, transformed for the model: inputs and targets [n, s, …]."""
        return self.row_reader(clients, positions[:, None], streams or Streams(0), 0)(0)

    def held(self, clients: Tensor, positions: Tensor, streams: Streams, round: int) -> Read:
        """Like `row_reader`, without the transform."""
        held, device = self.clients, self.device
        known = isinstance(held, SyntheticClients) or (isinstance(held, Federation) and held.gathers_itself)
        if self.synthetic is not None and not known:
            return self._one_by_one(clients, positions, streams, round)
        # Looked up on the class: a wrapper that forwards unknown attributes to a federation has its own rows.
        if (reader := getattr(type(held), "row_reader", None)) is not None:
            return cast(Read, reader(held, clients, positions, device))
        return lambda step: held.gather(clients, positions[:, step], device)

    def _one_by_one(self, clients: Tensor, positions: Tensor, streams: Streams, round: int) -> Read:
        """Like `held`, for rows that a caller's code makes: each client is read alone, with generators seeded for that client."""
        seeds = [int(streams.at("rows", round).generator(client).integers(2**62)) for client in clients.tolist()]

        def read(step: int) -> tuple[Inputs, Tensor]:
            parts = []
            for client, own, seed in zip(clients.split(1), positions.split(1), seeds, strict=True):
                with seeded_generators(self.device, seed + step):
                    parts.append(self.clients.gather(client, own[:, step], self.device))
            return cast(tuple[Inputs, Tensor], tree_map(lambda *values: torch.cat(values), *parts))

        return read

    def rates(self, given: Tensor | None, round: int, count: int) -> Tensor | None:
        """η_l of each of `count` clients, as given or by the schedule over rounds; None if the optimizer's own rate applies."""
        if given is not None or self.local.schedule is None:
            return given
        return torch.full((count,), self.local.in_round(round).rate, device=self.device)

    @cached_property
    def tied(self) -> bool:
        """Whether two layers share a parameter. torch's tie_weights would break a module in which one layer is only used twice."""
        owners = Counter(id(p) for module in self.model.modules() for p in module.parameters(recurse=False))
        return any(count > 1 for count in owners.values())


class Trainer(Protocol):
    """Computes updates w⁽ᵗ'τ⁾ − w⁽ᵗ⁾ [n, d] of a chunk of non-empty clients; `unit`: clients per tensor program, None for all."""

    name: str

    @property
    def unit(self) -> int | None: ...

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Rows = None, rates: Rows = None
    ) -> Tensor: ...


def rows_of_one(task: Task, x: Inputs, y: Tensor, weights: Tensor) -> tuple[Inputs, Tensor, Tensor]:
    """A single client's rows of a batch, without padding; a secure run keeps it, because a shape would reveal the client's size."""
    x, y, weights = each(lambda value: value[0], x), y[0], weights[0]
    if task.synthetic is not None:
        return x, y, weights
    real = weights > 0
    return each(lambda value: value[real], x), y[real], weights[real]


def batches(
    task: Task, clients: Tensor, schedule: Schedule, streams: Streams | None, round: int
) -> Callable[[int], tuple[Inputs, Tensor, Tensor]]:
    """A function from a batch of the schedule to (inputs, targets, weights) on the device."""
    weights = schedule.weights.to(task.device)
    read = task.row_reader(clients, schedule.positions, streams or Streams(0), round)
    return lambda step: (*read(step), weights[:, step])


def one_row(clients: Clients) -> tuple[Inputs, Tensor]:
    """A row of one client, inputs and targets [1, 1, …], for shapes and types. Raises `InputError` if no client has a readable row.

    A client whose rows can't be read is skipped: neither its error nor its existence may be revealed.
    """
    for holder in torch.nonzero(clients.sizes > 0).flatten():
        with suppress(Exception):
            return clients.gather(holder[None], torch.zeros((1, 1), dtype=torch.int64))
    require(bool((clients.sizes > 0).any()), "all clients are empty; at least one must have a row.")
    raise InputError("no client's rows can be read; try clients.gather(torch.tensor([0]), torch.tensor([[0]])).")


def pair_of_clients(task: Task) -> tuple[Inputs, Tensor]:
    """One row of each of two clients with data, repeated twice, because some layers do not accept a batch of one."""
    holders = torch.nonzero(task.clients.sizes > 0).flatten()
    pair = holders[[0, min(1, len(holders) - 1)]]
    return task.gather(pair, torch.zeros((2, 2), dtype=torch.int64))


def check_task(task: Task, *, labels: bool = False) -> None:
    """Check that model, data and loss fit each other, so that errors appear before the first round.

    With `labels` the clients' labels are checked too, which only a simulation may do: an error message reveals them.
    """
    x, y = pair_of_clients(task)
    model = copy.deepcopy(task.model).eval()
    own = each(lambda value: value[0], x)
    outputs = applied(model, own)
    if labels:
        check_labels("the clients' targets", task.loss, outputs, getattr(task.clients, "targets", None))
    with torch.no_grad():
        check_loss(task.loss, outputs, y[0])
    draws.check_draws(copy.deepcopy(task.model), own)
    if (doubt := output_warning(task.loss, outputs)) is not None:
        warn(doubt)
    if labels:
        _check_words(task, model)


def _check_words(task: Task, model: nn.Module) -> None:
    """Check that the model's embeddings know the smallest and the largest whole number of all rows."""
    inputs, prepare = getattr(task.clients, "inputs", None), getattr(task.clients, "prepare", None)
    if inputs is None or prepare is None or not any(isinstance(part, nn.Embedding) for part in model.modules()):
        return
    rows = []
    for value in leaves(inputs):
        if not value.is_floating_point() and not value.is_complex() and value.dtype != torch.bool and value.numel():
            flat = value.flatten(1) if value.dim() > 1 else value[:, None]
            rows += [int(flat.amax(1).argmax()), int(flat.amin(1).argmin())]
    if rows:
        x, _ = prepare(each(lambda value: value[rows], inputs), task.clients.targets[rows], task.device)  # type: ignore[attr-defined]
        with torch.no_grad():
            applied(model, x)


def applied(model: nn.Module, x: Inputs) -> Any:
    """Return the outputs of a model; raises `InputError` that names the layer which could not process its inputs."""
    inside: list[tuple[str, nn.Module, Any]] = []
    hooks = []
    for name, part in model.named_modules():
        if next(part.children(), None) is None:
            hooks.append(
                part.register_forward_pre_hook(lambda part, given, name=name: inside.append((name, part, given)))
            )
            hooks.append(part.register_forward_hook(lambda *_: inside.pop() and None))
    try:
        return call(model, x)
    except Exception as error:
        first = first_line(error).removesuffix(".")
        why = f"{first}." if not inside else _why(*inside[-1], first)
        raise InputError(f"the model can't be applied to a batch of inputs of shape {shape_of(x)}: {why}") from error
    finally:
        for hook in hooks:
            hook.remove()


def _why(name: str, part: nn.Module, given: Any, error: str) -> str:
    layer = f"layer {name!r} ({type(part).__name__})" if name else f"the {type(part).__name__}"
    x = given[0] if given and isinstance(given[0], Tensor) else None
    if x is None:
        return f"{layer}: {error}."
    weight = getattr(part, "weight", None)
    if isinstance(part, nn.Embedding | nn.EmbeddingBag):
        if x.is_floating_point():
            return f"{layer} looks up whole numbers and was given {_kind(x)}; give the inputs as whole numbers (int64)."
        low, high, words = int(x.min()), int(x.max()), part.num_embeddings
        if low < 0 or high >= words:
            known = f"{layer} knows the numbers from 0 to {words - 1} and was given numbers from {low} to {high}"
            return f"{known}; number them from 0, or build it with num_embeddings={high + 1}."
    elif isinstance(weight, Tensor) and x.dtype != weight.dtype:
        if not x.is_floating_point() and not x.is_complex():
            return f"{layer} computes in {_kind(weight)} and was given {_kind(x)}; give floats, x.float()."
        return f"{layer} has parameters in {_kind(weight)} and was given {_kind(x)}; train the model in float32, model.float()."
    if isinstance(part, nn.Linear) and x.shape[-1:] != (part.in_features,):
        width = x.shape[-1] if x.dim() else 1
        rows = f"{layer} takes {part.in_features} features and was given shape {tuple(x.shape)}"
        return f"{rows}; build it with in_features={width}, or flatten the rows first (nn.Flatten())."
    if isinstance(part, nn.modules.conv._ConvNd):
        return (
            f"{layer} takes rows of {part.in_channels} channels, (b, {part.in_channels}, …), and was given shape {tuple(x.shape)}; "
            "for images without a dimension of channels give x[:, None], for channels last x.movedim(-1, 1)."
        )
    return f"{layer} was given shape {tuple(x.shape)}: {error}."


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def low(x: Tensor, precision: Precision) -> Tensor:
    """Convert floating-point inputs to the network's precision; integers are tokens and are unchanged."""
    return x.bfloat16() if precision == "bf16" and x.is_floating_point() else x


@contextmanager
def arithmetic(precision: Precision, device: torch.device, *, same: bool = False) -> Iterator[None]:
    """Set torch's global precision switches for a local update. With `same`, cuDNN kernels are deterministic."""
    if device.type != "cuda":
        yield
        return
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic)
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    cudnn.deterministic = same or cudnn.deterministic
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.deterministic = before
