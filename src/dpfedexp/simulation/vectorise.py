"""Many clients in one tensor program, or one after the other where a module can't be vectorised."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from dpfedexp.errors import InputError
from dpfedexp.local import Params, Schedule, Sgd, descend
from dpfedexp.losses import Loss, check_per_example
from dpfedexp.simulation.fast.program import INPUT
from dpfedexp.simulation.fast.stepping import Batch, Stepper, Take
from dpfedexp.simulation.flat import Layout
from dpfedexp.simulation.module_state import Watch
from dpfedexp.simulation.precision import Precision, arithmetic, low
from dpfedexp.simulation.random import Streams

# torch says this once per layer and place, asks for an issue, and is no reason to act: what is slow is measured and not chosen.
warnings.filterwarnings(
    "ignore", message="There is a performance drop because we have not yet implemented the batching rule"
)


class Clients(Protocol):
    """What the simulator needs of a federation."""

    def __len__(self) -> int: ...

    @property
    def sizes(self) -> Tensor: ...

    def gather(
        self, clients: Tensor, positions: Tensor, device: torch.device | None = None
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Task:
    """What every client of a run does: a model, a loss, local steps, on a device.

    `watch` is what the module's state may be, and `copies` are the modules that train beside `model`.
    """

    model: nn.Module
    layout: Layout
    loss: Loss
    local: Sgd
    clients: Clients
    device: torch.device
    precision: Precision = "fp32"
    watch: Watch | None = None
    copies: list[nn.Module] = field(default_factory=list)

    def apart(self) -> Task:
        """The same task with a module of its own, for a thread of its own."""
        self.copies.append(copy.deepcopy(self.model))
        return replace(self, model=self.copies[-1])

    def check_state(self) -> None:
        """Nothing but parameters may leave a round: raises `InputError` if a module that trained has kept anything."""
        if self.watch is not None:
            for module in (self.model, *self.copies):
                self.watch.check(module)

    def losses(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        """One loss per example of one client, in float32."""
        if self.precision == "bf16":
            params = {name: value.bfloat16() for name, value in params.items()}
        outputs = functional_call(self.model, params, (low(x, self.precision),), tie_weights=self.tied)
        return self.loss(outputs.float() if self.precision == "bf16" else outputs, y)

    @cached_property
    def tied(self) -> bool:
        """Whether two layers share a parameter. torch's own tying leaves the module broken where one layer is merely used twice."""
        owners = Counter(id(p) for module in self.model.modules() for p in module.parameters(recurse=False))
        return any(count > 1 for count in owners.values())


class Trainer(Protocol):
    """Local updates w⁽ᵗ'τ⁾ − w⁽ᵗ⁾ of a chunk of non-empty clients, [n, d].

    `unit` is how many clients go into one tensor program, None where all of a chunk do.
    """

    name: str

    @property
    def unit(self) -> int | None: ...

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Tensor | None = None
    ) -> Tensor: ...


Gradients = Callable[[Params, Tensor, Tensor, Tensor], Params]


class Recorded:
    """Records the operations of a `torch.func` program and replays them: the same numbers, less overhead.

    A recording holds for one shape and layout and costs a few calls to make, so only shapes that come back often are recorded.
    """

    def __init__(self, program: Gradients, after: int = 12, keep: int = 32) -> None:
        self.program, self.after, self.keep = program, after, keep
        self.uses: Counter[tuple[object, ...]] = Counter()
        self.recordings: dict[tuple[object, ...], Gradients] = {}

    def __call__(self, params: Params, x: Tensor, y: Tensor, weights: Tensor) -> Params:
        # A recording keeps `view`s that hold for one memory layout only; the first step's parameters are an expanded vector.
        key = (x.shape, y.shape, x.stride(), *(value.stride() for value in params.values()))
        if key in self.recordings:
            return self.recordings[key](params, x, y, weights)
        self.uses[key] += 1
        if self.uses[key] > self.after and len(self.recordings) < self.keep:
            # Imported here because it takes seconds, which short runs and the command line's help would pay too.
            from torch.fx.experimental.proxy_tensor import make_fx

            self.recordings[key] = make_fx(self.program)(params, x, y, weights)
        return self.program(params, x, y, weights)


class Vectorised:
    """All clients of a chunk at once: `vmap(grad(loss))` over stacked parameters.

    `record` must be False where several threads train: recording changes torch for all of them while it lasts.
    """

    name = "vectorised"
    unit = None

    def __init__(self, task: Task, record: bool = True) -> None:
        self.task = task

        def loss(params: Params, x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            return (task.losses(params, x, y) * weights).sum()

        self.gradients = Recorded(vmap(grad(loss)), keep=32 if record else 0)

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Tensor | None = None
    ) -> Tensor:
        layout, n = self.task.layout, len(clients)
        start = layout.unflatten(w.expand(n, -1))
        batch_of = _batches(self.task, clients, schedule)
        with arithmetic(self.task.precision, self.task.device):
            end = descend(
                self.task.local,
                start,
                lambda params, step: self.gradients(params, *batch_of(step)),
                schedule,
                None if correction is None else layout.unflatten(correction),
            )
        return layout.flatten(end, n) - w


class Loop:
    """One client after the other: slower, and right for any module."""

    name = "loop"
    unit = 1

    def __init__(self, task: Task, streams: Streams) -> None:
        self.task, self.streams = task, streams

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(len(clients), len(w), device=w.device)
        with arithmetic(self.task.precision, self.task.device):
            for row in range(len(clients)):
                at = slice(row, row + 1)
                self._one(
                    w, clients[at], schedule.part(at), round, None if correction is None else correction[at], out[at]
                )
        return out

    def _one(
        self, w: Tensor, client: Tensor, one: Schedule, round: int, correction: Tensor | None, out: Tensor
    ) -> None:
        """The update of one client into `out` [1, d], where its parameters live meanwhile."""
        task = self.task
        batch_of = _batches(task, client, one)
        stepper = Stepper(ByAutograd(task), task.layout, task.local)
        stepper.begin(w, 1, correction, into=out)
        # A module that draws (dropout) takes its draws from the client's own stream, whatever ran before it.
        with torch.random.fork_rng(devices=[task.device] if task.device.type == "cuda" else []):
            key = self.streams.at("module", round).generator(int(client)).integers(2**63)
            torch.manual_seed(int(key))
            for step in range(int(one.steps)):
                x, y, weights = batch_of(step)
                stepper.step(Batch({INPUT: x}, y, weights), None)
        out.sub_(w)


@dataclass(frozen=True)
class ByAutograd:
    """Gradients of a single client by torch's own backward pass, without the rows that only pad its batch."""

    task: Task

    def prepare(self, x: Tensor) -> dict[int, Tensor]:
        return {INPUT: x}

    def descend(
        self, params: Mapping[str, Tensor], fixed: Mapping[int, Tensor], targets: Tensor, weights: Tensor, take: Take
    ) -> None:
        real = weights[0] > 0
        leaves = {name: value[0].detach().requires_grad_() for name, value in params.items()}
        losses = self.task.losses(leaves, fixed[INPUT][0][real], targets[0][real])
        grads = torch.autograd.grad((losses * weights[0][real]).sum(), list(leaves.values()), allow_unused=True)
        for (name, value), gradient in zip(leaves.items(), grads, strict=True):
            take(name, torch.zeros_like(value)[None] if gradient is None else gradient[None])


def _batches(task: Task, clients: Tensor, schedule: Schedule) -> Callable[[int], tuple[Tensor, Tensor, Tensor]]:
    """step → (inputs, targets, weights) on the device; gathered once where every step uses the same batch."""

    def gather(step: int) -> tuple[Tensor, Tensor, Tensor]:
        positions, weights = schedule.batch(step)
        x, y = task.clients.gather(clients, positions, task.device)
        return x, y, weights.to(task.device)

    if schedule.positions.shape[1] > 1:
        return gather
    constant = gather(0)
    return lambda step: constant


def _why_not(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"layer {name!r} ({type(module).__name__}) draws random numbers"
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch"
    return None


def _pair(task: Task) -> tuple[Tensor, Tensor]:
    """One row each of two clients that hold data, twice: some layers take no batch of one."""
    holders = torch.nonzero(task.clients.sizes > 0).flatten()
    pair = holders[[0, min(1, len(holders) - 1)]]
    return task.clients.gather(pair, torch.zeros((2, 2), dtype=torch.int64), task.device)


def check_task(task: Task) -> None:
    """Model, data and loss fit each other, so that a failure shows before the first round."""
    x, y = _pair(task)
    with torch.no_grad():
        try:
            outputs = copy.deepcopy(task.model).eval()(x[0])
        except Exception as error:
            raise InputError(
                f"the model can't be applied to a batch of inputs of shape {tuple(x[0].shape)}: {first_line(error)}"
            ) from error
        try:
            losses = task.loss(outputs, y[0])
        except Exception as error:
            raise InputError(
                f"the loss can't be applied to outputs of shape {tuple(outputs.shape)} and targets of shape "
                f"{tuple(y[0].shape)} ({y.dtype}): {first_line(error)}"
            ) from error
        check_per_example(losses, len(x[0]))


def choose(task: Task, streams: Streams) -> tuple[Trainer, str | None]:
    """The vectorised trainer if `torch.func.vmap` can trace the module, else the loop with the reason; tried on two clients."""
    reason = _why_not(task.model)
    if reason is None:
        trainer = Vectorised(task)
        x, y = _pair(task)
        w = task.layout.read(task.model).float().to(task.device)
        try:
            weights = torch.full((2, 2), 0.5, device=task.device)
            trainer.gradients.program(task.layout.unflatten(w.expand(2, -1)), x, y, weights)
            return trainer, None
        except Exception as error:
            reason = first_line(error)
    return Loop(task, streams), reason


def first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]
