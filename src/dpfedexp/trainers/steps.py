"""Local steps of clients: together in one tensor program, in tiles on several cores, as a CUDA graph, or one after the other.

`Stepper` is the local step of every trainer, w ← w − η_l·direction; a `Core` computes the gradients.
"""

import gc
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from threading import local
from typing import Any, Protocol, cast
from weakref import WeakSet

import torch
from torch import Tensor
from torch.func import grad, vmap

from dpfedexp.core.local_optimizer import Clock, LocalOptimizer, Moments, Schedule, as_rows
from dpfedexp.core.modules import Inputs, Layout, Params, each, leaves
from dpfedexp.core.noise import Streams
from dpfedexp.machine import run_on_threads, without_subnormals
from dpfedexp.trainers.draws import seeded_generators, step_keys
from dpfedexp.trainers.fast.ops import INPUT, KEYS, Gradient, computed
from dpfedexp.trainers.fast.program import Objective, Program
from dpfedexp.trainers.task import Precision, Rows, Task, Trainer, batches, low, rows_of_one

# torch warns once per layer and place. The warning needs no action: trainers are timed, and slow ones are not chosen.
warnings.filterwarnings(
    "ignore", message="There is a performance drop because we have not yet implemented the batching rule"
)
Take = Callable[[str, Gradient], None]


@dataclass(frozen=True)
class Batch:
    """The data of one step: the core's prepared inputs, targets [n, s, …] and weights [n, s]."""

    fixed: dict[int, Inputs]
    targets: Tensor
    weights: Tensor

    def tensors(self) -> list[Tensor]:
        return [*(leaf for value in self.fixed.values() for leaf in leaves(value)), self.targets, self.weights]


class Core(Protocol):
    """Computes gradients: `prepare` returns values that depend on the data alone; `descend` passes each gradient to `take`."""

    def prepare(self, x: Inputs) -> dict[int, Inputs]:
        return {INPUT: x}

    def descend(self, params: Params, batch: Batch, take: Take) -> None: ...


@dataclass
class Stepper:
    """The parameters w⁽ᵗ'ᵏ⁾ of n clients and their local step, w ← w − η_l·direction, for every trainer.

    The proximal term and SCAFFOLD's correction are added to the gradient before the optimizer sees it. Clients that have taken
    all their steps no longer move.
    """

    core: Core
    layout: Layout
    local: LocalOptimizer
    start: Params = field(default_factory=dict)
    params: Params = field(default_factory=dict)
    moments: dict[str, Moments] = field(default_factory=dict)
    clock: Clock = field(default_factory=lambda: Clock(torch.zeros(()), torch.zeros(0)))
    correction: Params | None = None
    uneven: bool = False
    rates: Rows = None
    keys: Rows = None

    def begin(
        self, w: Tensor, steps: Tensor, correction: Rows, rates: Rows, keys: Rows, *, uneven: bool, into: Rows = None
    ) -> None:
        """Set all clients to w [d], with steps [n] and optionally SCAFFOLD's c − c_i [n, d], η_l [n] and keys of draws [n].

        `uneven` says that some clients take fewer steps than others; `into` is memory for the clients' parameters, [n, d].
        """
        n = len(steps)
        self.start = self.layout.unflatten(w)
        if into is not None:
            self.params = self.layout.unflatten(into.copy_(w))
        else:
            # A copy for each client, because a module may write into its parameters.
            self.params = {name: value.expand(n, *value.shape).clone() for name, value in self.start.items()}
        self.moments = {
            name: {moment: value.new_zeros(n, *value.shape) for moment in self.local.moment_names}
            for name, value in self.start.items()
        }
        self.clock = Clock(torch.zeros((), dtype=torch.float64, device=w.device), steps.to(w.device))
        self.correction = None if correction is None else self.layout.unflatten(correction)
        self.uneven = uneven
        self.rates = None if rates is None else rates.to(w.device, w.dtype)
        self.keys = keys

    def begin_again(self) -> None:
        """Restart like `begin` in the existing memory; `start`, `correction` and the clients' steps are unchanged."""
        for name, value in self.params.items():
            value.copy_(self.start[name].expand_as(value))
        for moments in self.moments.values():
            for moment in moments.values():
                moment.zero_()
        self.clock.step.zero_()

    def step(self, batch: Batch) -> None:
        going = self.clock.step < self.clock.steps if self.uneven else None
        gradients: Params = {}
        local = self.local

        def take(name: str, given: Gradient) -> None:
            value, gradient = self.params[name], computed(given)
            if local.proximal:
                gradient = gradient + local.proximal * (value - self.start[name])
            if self.correction is not None:
                gradient = gradient + self.correction[name]
            if local.needs_all_gradients:
                gradients[name] = gradient.to(value.dtype)
            else:
                self._move(name, gradient, going)

        if self.keys is not None:
            batch = replace(batch, fixed={**batch.fixed, KEYS: step_keys(self.keys, self.clock.step)})
        self.core.descend(self.params, batch, take)
        for name, gradient in (local.combine_gradients(gradients) if local.needs_all_gradients else {}).items():
            self._move(name, gradient, going)
        self.clock.step.add_(1)

    def _move(self, name: str, gradient: Tensor, going: Tensor | None) -> None:
        value, moments = self.params[name], self.moments[name]
        if moments:
            # A bf16 gradient can be added to float32 as it is, but squared in bf16 it would make the moments too coarse.
            gradient = gradient.to(value.dtype)
        direction = self.local.direction(value, gradient, moments, self.clock)
        if going is not None:
            direction = torch.where(as_rows(going, value), direction, torch.zeros_like(value))
        if self.rates is not None:
            value.addcmul_(as_rows(self.rates, value), direction.to(value.dtype), value=-1)
        else:
            value.add_(direction, alpha=-self.local.rate)

    def moved(self) -> Tensor:
        """The updates w⁽ᵗ'ᵏ⁾ − w⁽ᵗ⁾, [n, d]."""
        moved = {name: value - self.start[name] for name, value in self.params.items()}
        return self.layout.flatten(moved, rows=len(self.clock.steps))


EVEN, OWN_WIDTHS = 8, 3
"""If cohort sizes are random, recordings are for multiples of `EVEN`; the first few sizes have recordings of their own."""
Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Turns a function without arguments into one that does the same to the same memory, with less overhead."""


_pools: dict[int, tuple[Any, WeakSet[torch.cuda.CUDAGraph]]] = {}
"""Per device, one memory pool for temporary values of all CUDA graphs, and the graphs that use it; steps keep none of them."""


def _pool(device: int) -> tuple[Any, WeakSet[torch.cuda.CUDAGraph]]:
    # Torch frees a pool with the last graph that uses it, and then no longer accepts its handle.
    if device not in _pools or not _pools[device][1]:
        _pools[device] = torch.cuda.graph_pool_handle(), WeakSet()
    return _pools[device]


def cuda_graph(function: Callable[[], None]) -> Callable[[], None]:
    """Capture a function as a CUDA graph and return its replay, for steps whose kernel launches take longer than the kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # An old graph that is garbage-collected during the capture would abort it.
    gc.collect()
    gc.disable()
    try:
        handle, users = _pool(torch.cuda.current_device())
        with torch.cuda.graph(graph, pool=handle):
            function()
        users.add(graph)
    finally:
        gc.enable()
    return graph.replay


class Recording:
    """A `Stepper` with fixed memory, so that its step can be captured once per shape and replayed."""

    def __init__(self, inner: Stepper, capture: Capture) -> None:
        self.inner, self.capture = inner, capture
        self.replay: Callable[[], None] | None = None
        self.again: Callable[[], None] | None = None
        self.steps: Tensor | None = None
        self.batch: Batch | None = None
        self.loaded: Batch | None = None
        self.held: list[Rows] = []

    def begin(
        self, w: Tensor, steps: Tensor, correction: Rows, rates: Rows, keys: Rows, *, uneven: bool, into: Rows = None
    ) -> None:
        if into is not None:
            raise ValueError("a recording has memory of its own; its updates are copied.")
        # The batch of the round before would take memory beside that of this round.
        self.loaded = None
        if not self.held:
            self.steps = steps.clone()
            rates = None if rates is None else rates.to(w.device, w.dtype)
            flat, *rest = w.clone(), *(None if rows is None else rows.clone() for rows in (correction, rates, keys))
            self.held = [flat, *rest]
            self.inner.begin(flat, steps.clone(), *rest, uneven=uneven)
            return
        if self.steps is None or not torch.equal(steps, self.steps):
            self.inner.clock.steps.copy_(steps)
            self.steps = steps.clone()
        for held, given in zip(self.held, (w, correction, rates, keys), strict=True):
            if held is not None and given is not None:
                held.copy_(given)
        (self.again or self.inner.begin_again)()

    def step(self, batch: Batch) -> None:
        if self.batch is None or self.replay is None:
            fixed = {i: each(torch.clone, value) for i, value in batch.fixed.items()}
            self.batch = mine = Batch(fixed, batch.targets.clone(), batch.weights.clone())
            self.replay = self.capture(lambda: self.inner.step(mine))
            self.again = self.capture(self.inner.begin_again)
            # Capturing has executed steps, so restart before the first step of the round.
            self.again()
        if batch is not self.loaded:
            for own, given in zip(self.batch.tensors(), batch.tensors(), strict=True):
                own.copy_(given)
            self.loaded = batch
        self.replay()

    def moved(self) -> Tensor:
        return self.inner.moved()


class Recordings:
    """Recordings by shape: a shape is recorded at its second use, and the oldest recording is dropped if there are too many."""

    def __init__(self, fresh: Callable[[], Stepper], capture: Capture, keep: int = 8) -> None:
        self.fresh, self.capture, self.keep = fresh, capture, keep
        self.widths: set[int] = set()
        self.seen: set[Any] = set()
        self.held: dict[Any, Recording] = {}

    def width(self, clients: int) -> int:
        """The number of clients to pad to: no padding for the first few sizes, else the next multiple of `EVEN`."""
        if clients in self.widths or len(self.widths) < OWN_WIDTHS or clients <= EVEN:
            self.widths.add(clients)
            return clients
        return -(-clients // EVEN) * EVEN

    def stepper(self, key: Any) -> Stepper | Recording:
        if key in self.held:
            return self.held[key]
        if key not in self.seen:
            self.seen.add(key)
            return self.fresh()
        if len(self.held) >= self.keep:
            del self.held[next(iter(self.held))]
        self.held[key] = Recording(self.fresh(), self.capture)
        return self.held[key]


@dataclass(frozen=True)
class ByProgram(Core):
    """Gradients by a `Program`; in bf16 its values and products are bfloat16, while parameters and sums stay float32."""

    program: Program
    objective: Objective
    precision: Precision = "fp32"

    def prepare(self, x: Inputs) -> dict[int, Inputs]:
        return self.program.prepare(low(x, self.precision))

    def descend(self, params: Params, batch: Batch, take: Take) -> None:
        used = params if self.precision != "bf16" else {name: p.bfloat16() for name, p in params.items()}
        self.program.descend(used, batch.fixed, batch.targets, batch.weights, self.objective, take)


@dataclass(frozen=True)
class ByVmap(Core):
    """Gradients by `vmap(grad(loss))`, for any module that `vmap` can trace."""

    gradients: Callable[..., Params]

    def descend(self, params: Params, batch: Batch, take: Take) -> None:
        keys = (batch.fixed[KEYS],) if KEYS in batch.fixed else ()
        gradients = self.gradients(dict(params), batch.fixed[INPUT], batch.targets, batch.weights, *keys)
        for name, gradient in gradients.items():
            take(name, gradient)


class Steps:
    """Trains all clients of a chunk at once and in place; with `record`, each step is captured by it and replayed.

    A module that draws random numbers needs the run's `streams`.
    """

    unit = None

    def __init__(
        self, task: Task, name: str, core: Core, *, record: Capture | None = None, streams: Streams | None = None
    ) -> None:
        self.task, self.name, self.core, self.streams = task, name, core, streams
        self.recordings = None if record is None else Recordings(self._fresh, record)

    def _fresh(self) -> Stepper:
        return Stepper(self.core, self.task.layout, self.task.optimizer)

    def __call__(
        self,
        w: Tensor,
        clients: Tensor,
        schedule: Schedule,
        round: int,
        correction: Rows = None,
        rates: Rows = None,
        out: Rows = None,
    ) -> Tensor:
        """Return the updates, [n, d]. With `out`, they are written there, and `out` holds the parameters during training."""
        if self.recordings is not None and (more := self.recordings.width(len(clients)) - len(clients)):
            clients, schedule, correction, rates = _filled(more, clients, schedule, correction, rates)
            return self(w, clients, schedule, round, correction, rates)[: len(clients) - more]
        uneven = schedule.uneven
        rates = self.task.rates(rates, round, len(clients))
        with torch.no_grad(), self.task.arithmetic():
            key = (*schedule.positions.shape[::2], uneven, correction is None, rates is None)
            stepper = self._fresh() if self.recordings is None else self.recordings.stepper(key)
            keys = self.task.keys(self.streams, round, clients)
            stepper.begin(w, schedule.steps, correction, rates, keys, uneven=uneven, into=out)
            batch_of = _batches(self.task, self.core, clients, schedule, self.streams, round)
            for step in range(schedule.longest):
                stepper.step(batch_of(step))
            return stepper.moved() if out is None else out.sub_(w)


def _batches(
    task: Task, core: Core, clients: Tensor, schedule: Schedule, streams: Streams | None, round: int
) -> Callable[[int], Batch]:
    """A function from a step to its batch, which is made once if every step uses the same batch."""
    gathered = batches(task, clients, schedule, streams, round)

    def make(step: int) -> Batch:
        x, y, weights = gathered(step)
        return Batch(core.prepare(x), y, weights)

    if schedule.positions.shape[1] > 1:
        return make
    constant = make(0)
    return lambda step: constant


def _filled(
    more: int, clients: Tensor, plan: Schedule, correction: Rows, rates: Rows
) -> tuple[Tensor, Schedule, Rows, Rows]:
    """Repeat the last client `more` times to fill a shape; the extra updates are dropped."""

    def fill(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[-1:].expand(more, *rows.shape[1:])])

    filled = Schedule(fill(plan.positions), fill(plan.weights), fill(plan.steps), plan.most)
    own, rate = (None if rows is None else fill(rows) for rows in (correction, rates))
    return fill(clients), filled, own, rate


class Vectorized(Steps):
    """Trains all clients of a chunk at once: `vmap(grad(loss))` over stacked parameters; `record` records repeated shapes."""

    def __init__(self, task: Task, record: bool = True, streams: Streams | None = None) -> None:
        def loss(params: Params, x: Inputs, y: Tensor, weights: Tensor, *key: Tensor) -> Tensor:
            return (task.losses(params, x, y, *key) * weights).sum()

        self.gradients = task.program("gradients of clients", vmap(grad(loss)), batched=True, keep=32 if record else 0)
        super().__init__(task, "vectorized", ByVmap(self.gradients), streams=streams)


class Parallel:
    """Runs another trainer in tiles that fit a CPU's cache, on as many threads as torch has; `make` makes one trainer per thread.

    With `fixed` every tile has the same number of clients and runs on a worker thread; the caller pads the last tile. Otherwise
    `tile_of` gives the number of clients of a tile for a number of rows; `tile` is that for the largest client.
    """

    def __init__(
        self,
        name: str,
        make: Callable[[], Trainer],
        tile: int,
        threads: int | None = None,
        *,
        fixed: bool = False,
        tile_of: Callable[[int], int] | None = None,
    ) -> None:
        self.name, self.make, self.tile, self.fixed = name, make, tile, fixed
        self.tile_of = tile_of or (lambda rows: tile)
        self.unit = tile
        self.threads = threads or torch.get_num_threads()
        self.own = local()

    @property
    def in_flight(self) -> int:
        return self.tile * self.threads

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Rows = None, rates: Rows = None
    ) -> Tensor:
        n = len(clients)
        tile = self.tile
        if not self.fixed:
            # The last tiles decide when a chunk is done, so every thread should get a few tiles.
            tile = self.tile_of(schedule.positions.shape[-1])
            tile = max(1, min(tile, -(-n // (2 * self.threads)))) if self.threads > 1 else tile
            if n <= tile:
                with without_subnormals():
                    return self._trainer()(w, clients, schedule, round, correction, rates)
        out = torch.empty(n, len(w), device=w.device)

        def one(first: int) -> None:
            at = slice(first, first + tile)
            own, rate = (None if rows is None else rows[at] for rows in (correction, rates))
            trainer = self._trainer()
            with without_subnormals():
                if isinstance(trainer, Steps):
                    # Rows may be as large as a cache: write them into `out` directly instead of copying.
                    trainer(w, clients[at], schedule.part(at), round, own, rate, out=out[at])
                else:
                    out[at] = trainer(w, clients[at], schedule.part(at), round, own, rate)

        run_on_threads(one, range(0, n, tile), self.threads, always=self.fixed)
        return out

    def _trainer(self) -> Trainer:
        if not hasattr(self.own, "trainer"):
            self.own.trainer = self.make()
        return cast(Trainer, self.own.trainer)


class Loop:
    """Trains one client after the other: slower, and correct for any module."""

    name = "loop"
    unit = 1

    def __init__(self, task: Task, streams: Streams, *, keyed: bool = False) -> None:
        # With `keyed` all draws of the module come from its clients' keys, as under `vmap`, and no generator is seeded.
        self.task, self.streams = task, streams
        self.seeds = not keyed and task.synthetic is None

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Rows = None, rates: Rows = None
    ) -> Tensor:
        out = torch.empty(len(clients), len(w), device=w.device)
        keys = self.task.keys(self.streams, round, clients)
        rates = self.task.rates(rates, round, len(clients))
        with self.task.arithmetic():
            for row in range(len(clients)):
                at = slice(row, row + 1)
                own = [None if rows is None else rows[at] for rows in (correction, rates, keys)]
                self._one(w, clients[at], schedule.part(at), round, out[at], own)
        return out.sub_(w)

    def _one(self, w: Tensor, client: Tensor, one: Schedule, round: int, out: Tensor, own: Sequence[Rows]) -> None:
        """Train one client in place in `out` [1, d], which receives its parameters; `own` are its correction, rate and key."""
        task = self.task
        core = ByAutograd(task)
        batch_of = _batches(task, core, client, one, self.streams, round)
        stepper = Stepper(core, task.layout, task.optimizer)
        stepper.begin(w, one.steps, *own, uneven=False, into=out)
        # Draws without a key, such as by a module that uses NumPy, come from the client's own stream.
        seed = int(self.streams.at("module", round).generator(int(client)).integers(2**63))
        with seeded_generators(task.device, seed) if self.seeds else nullcontext():
            for step in range(int(one.steps)):
                stepper.step(batch_of(step))


@dataclass(frozen=True)
class ByAutograd(Core):
    """Gradients of a single client by torch's backward pass; a simulation leaves out padding rows."""

    task: Task

    def descend(self, params: Params, batch: Batch, take: Take) -> None:
        own = {name: value[0] for name, value in params.items()}
        key = (batch.fixed[KEYS][0],) if KEYS in batch.fixed else ()
        rows = rows_of_one(self.task, batch.fixed[INPUT], batch.targets, batch.weights)
        plain = self.task.synthetic is None
        program = self.gradients if plain else self.task.program("gradients of a client", self.gradients)
        for name, gradient in program(own, *rows, *key).items():
            take(name, gradient[None])

    def gradients(self, params: Params, x: Inputs, y: Tensor, weights: Tensor, *key: Tensor) -> Params:
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            losses = self.task.losses(leaves, x, y, *key)
            found = torch.autograd.grad((losses * weights).sum(), list(leaves.values()), allow_unused=True)
        pairs = zip(leaves.items(), found, strict=True)
        return {name: torch.zeros_like(value) if given is None else given for (name, value), given in pairs}
