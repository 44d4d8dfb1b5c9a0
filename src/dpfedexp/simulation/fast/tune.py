"""Which trainer a run gets: by name, or the one that is fastest on its own first clients.

A run that is over in a moment anyway takes plain `vmap` without asking. Otherwise each candidate trains a few clients for one step,
and the best time of a few decides; the answer is kept for the same network, shapes and device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.errors import InputError
from dpfedexp.local import Schedule, schedule
from dpfedexp.simulation.chunk import Footprint, footprint
from dpfedexp.simulation.fast.objective import objective
from dpfedexp.simulation.fast.ops import Unsupported
from dpfedexp.simulation.fast.program import Program
from dpfedexp.simulation.fast.trace import compile_module
from dpfedexp.simulation.fast.trainer import ByProgram, Fast
from dpfedexp.simulation.parallel import Parallel
from dpfedexp.simulation.random import Streams
from dpfedexp.simulation.vectorise import Loop, Task, Trainer, Vectorised, choose

log = logging.getLogger("dpfedexp")

NAMES = ("auto", "fast", "vectorised", "loop")
TILE_BYTES = 16 * 2**20
"""Activations of the clients of one tile: more does not fit a cache, less is all overhead."""
WORTH_MEASURING = 10**9
"""Numbers that a run computes, below which it is over sooner than its candidates are compared."""

_remembered: dict[object, str] = {}


@dataclass(frozen=True)
class Candidate:
    name: str
    make: Callable[[], Trainer]


def select(task: Task, streams: Streams, name: str, *, chunk: int, updates: float) -> tuple[Trainer, str | None]:
    """The trainer, and a note for the user if the module can't be vectorised; `updates` is clients times rounds."""
    if name not in NAMES:
        raise InputError(f"trainer is {name!r}; it must be 'auto', 'fast', 'vectorised' or 'loop'.")
    if name == "loop":
        return Loop(task, streams), None
    plain, reason = choose(task, streams)
    if reason is not None:
        if name != "auto":
            raise InputError(f"the model can't be vectorised over clients: {reason}. Use trainer='loop' or 'auto'.")
        return plain, (
            f"the model can't be vectorised over clients ({reason}); training them one after the other instead, "
            "which is usually 10 to 100 times slower."
        )
    size = footprint(task)
    if name == "fast":
        return _fast(task, _program(task), size), None
    if name == "vectorised" or updates * _per_update(task, size) < WORTH_MEASURING:
        return plain, None
    options = list(_candidates(task, streams, plain, size))
    return _quickest(task, options, chunk), None


def _per_update(task: Task, size: Footprint) -> float:
    """Numbers that one client's local update computes, about."""
    steps = float(task.local.step_count(torch.tensor([size.rows])))
    return steps * size.rows * (size.activations + task.layout.dimension)


def _candidates(task: Task, streams: Streams, plain: Trainer, size: Footprint) -> Iterator[Candidate]:
    try:
        program = _program(task)
        yield Candidate("fast", lambda: _fast(task, program, size))
    except InputError as why:
        log.debug("no fast program: %s", why)
    if task.device.type == "cpu":
        # vmap refuses a module that draws random numbers, so what it takes may run on several threads.
        yield Candidate("vectorised", lambda: Parallel(Vectorised(task), size.tile(TILE_BYTES)))
        yield Candidate("loop", lambda: Parallel(Loop(task, streams), 1))
    else:
        yield Candidate("vectorised", lambda: plain)


def _program(task: Task) -> Program:
    """The module's program, held against `vmap` on two clients' own data before it is trusted."""
    try:
        program = compile_module(task.model, task.layout.names)
        _check(task, program)
    except Unsupported as reason:
        raise InputError(f"the model has no fast program: {reason}. Use trainer='auto'.") from None
    return program


def _fast(task: Task, program: Program, size: Footprint) -> Trainer:
    core = ByProgram(program, objective(task.loss), task.precision)
    if task.device.type != "cpu":
        return Fast(task, core, record=True)
    return Parallel(Fast(task, core), size.tile(TILE_BYTES))


def _check(task: Task, program: Program) -> None:
    clients, plan = sample(task, 2)
    positions, weights = plan.batch(0)
    x, y = task.clients.gather(clients, positions, task.device)
    w = task.layout.read(task.model).float().to(task.device)
    params = task.layout.unflatten(w.expand(len(clients), -1))
    weights = weights.to(task.device)
    expected = Vectorised(task).gradients.program(params, x, y, weights)
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        core = ByProgram(program, objective(task.loss), task.precision)
        core.descend(params, core.prepare(x), y, weights, found.__setitem__)
    # A wrong rule is off by the size of the gradient itself; ties in a max-pool and rounding are not.
    tolerance = 0.2 if task.precision == "bf16" else 0.01
    for name, gradient in expected.items():
        scale = float(torch.linalg.vector_norm(gradient))
        off = float(torch.linalg.vector_norm(found[name].float() - gradient))
        if not off <= tolerance * scale + 1e-6:
            raise Unsupported(f"the rules give another gradient of {name!r}")


def sample(task: Task, count: int) -> tuple[Tensor, Schedule]:
    """The largest clients, and a plan for them."""
    sizes = task.clients.sizes
    count = min(count, int((sizes > 0).sum()))
    clients = torch.arange(count) if bool((sizes[0] == sizes).all()) else torch.topk(sizes, count).indices
    streams = Streams(0).at("batches", 0)
    return clients, schedule(task.local, sizes[clients], lambda row: streams.generator(int(clients[row])))


def _quickest(task: Task, options: list[Candidate], chunk: int) -> Trainer:
    if len(options) == 1:
        return options[0].make()
    clients, plan = sample(task, chunk if task.device.type != "cpu" else min(chunk, 2 * torch.get_num_threads()))
    one_step = Schedule(plan.positions[:, :1], plan.weights[:, :1], torch.ones_like(plan.steps))
    key = (repr(task.model), task.layout, task.loss, one_step.positions.shape, task.device, task.precision)
    if key not in _remembered:
        times = {option.name: _time(task, option.make(), clients, one_step) for option in options}
        log.debug("seconds per step of %d clients: %s", len(clients), times)
        _remembered[key] = min(times, key=times.__getitem__)
    return next(option for option in options if option.name == _remembered[key]).make()


def _time(task: Task, trainer: Trainer, clients: Tensor, plan: Schedule) -> float:
    """Seconds of one step of these clients: the best of three after a first that warms up, or less if they are slow."""
    w = task.layout.read(task.model).float().to(task.device)

    def once() -> float:
        began = time.perf_counter()
        trainer(w, clients, plan, 1)
        if task.device.type == "cuda":
            torch.cuda.synchronize(task.device)
        return time.perf_counter() - began

    try:
        best = once()
        if best > 2.0:
            return best
        return min(once() for _ in range(4))
    except torch.cuda.OutOfMemoryError:
        return float("inf")
