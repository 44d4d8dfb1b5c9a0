"""Which trainer a run gets: by name, or the one that is fastest on its own first clients.

A run that is over in a moment anyway takes plain `vmap` without asking. Otherwise each candidate trains a few clients for one step,
and the best time of a few decides; the answer is kept for the same network, shapes and device.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import Tensor

from dpfedexp.batches import Schedule
from dpfedexp.errors import InputError, require
from dpfedexp.noise.streams import Streams
from dpfedexp.trainers.checks.isolation import is_isolated
from dpfedexp.trainers.chunk_size import Footprint, footprint
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.programs import Programs, sample
from dpfedexp.trainers.registry import Parts, check_trainer, makers
from dpfedexp.trainers.task import Task, Trainer
from dpfedexp.trainers.tiled import Parallel
from dpfedexp.trainers.vectorised import choose

log = logging.getLogger("dpfedexp")

TILE_BYTES = 32 * 2**20
"""Activations of the clients of one tile: more does not fit a cache, less is all overhead. Best of 16, 32 and 64 MB."""
WORTH_MEASURING = 5 * 10**7
"""Floating-point numbers that the whole run computes. With fewer it is over sooner than its candidates could be compared."""

ALIKE = 1.15
"""Candidates within this factor of the quickest count as equally quick."""

_remembered: dict[object, str] = {}


Makers = dict[str, Callable[[], Trainer]]


def select(
    task: Task,
    streams: Streams,
    name: str,
    *,
    chunk: int,
    updates: float,
    budget: int | None = None,
    trial: Task | None = None,
) -> tuple[Trainer, str | None]:
    """The trainer, and a note for the user if it is slower than they might expect.

    Args:
        chunk: clients that are trained together.
        updates: clients times rounds, which says how much a good choice is worth.
        budget: bytes that a chunk may take.
        trial: in an isolated run, the same task with made-up clients. Everything is tried on those, and a trainer is taken only
            if it keeps clients apart.
    """
    check_trainer(name)
    if name == "loop":
        return Loop(task, streams), None
    isolated, on = trial is not None, trial or task
    _, reason = choose(on, streams)
    if reason is not None:
        if name != "auto":
            raise InputError(f"the model can't be vectorised over clients: {reason}. Use trainer='loop' or 'auto'.")
        return Loop(task, streams), (
            f"the model can't be vectorised over clients ({reason}); training them one after the other instead, "
            "which is usually 10 to 100 times slower."
        )
    if isolated and not task.local.shape_is_public:
        return _one_by_one(task, streams, name)
    size = footprint(on)
    tile = size.tile(_tile_bytes(budget))
    if isolated:
        tile = max(1, min(tile, -(-chunk // (2 * torch.get_num_threads()))))
    programs = Programs(on)
    candidates, offered = (makers(Parts(which, streams, programs, tile, isolated)) for which in (on, task))
    if name != "auto":
        require(name in offered, f"trainer is {name!r}, which a device of type {task.device.type!r} does not have.")
        require(
            not isolated or keeps_apart(on, candidates[name](), chunk),
            f"trainer is {name!r}, but on this device a client's update then depends on the others of its chunk, which a "
            "secure run may not let happen. Use trainer='auto'.",
        )
        return offered[name](), None
    brief = updates * _per_update(on, size) < WORTH_MEASURING
    if on.device.type == "cpu" and not brief:
        # Threads that each take a tile of clients beat threads that share every operation.
        candidates.pop("vectorised")
    if tile == 1:
        # vmap over a single client is the loop with more overhead.
        candidates.pop("tiled-vectorised", None)
    if brief:
        candidates = {"vectorised": candidates.pop("vectorised"), **candidates}
    chosen = _choice(on, candidates, chunk, brief=brief, isolated=isolated)
    if chosen is None:
        return Loop(task, streams), (
            "on this device no trainer that takes several clients at once keeps them apart bit for bit; training them one after "
            "the other instead, because the run is secure."
        )
    return offered[chosen](), None


def _choice(trial: Task, candidates: Makers, chunk: int, *, brief: bool, isolated: bool) -> str | None:
    """The quickest candidate, or in a brief run the first; in an isolated run only of those that keep clients apart."""
    if brief:
        return next(
            (name for name, make in candidates.items() if not isolated or _made_apart(trial, make, chunk)), None
        )
    if isolated:
        candidates = {name: make for name, make in candidates.items() if _made_apart(trial, make, chunk)}
    return _quickest(trial, candidates, chunk) if candidates else None


def _made_apart(trial: Task, make: Callable[[], Trainer], chunk: int) -> bool:
    try:
        return keeps_apart(trial, make(), chunk)
    except (InputError, RuntimeError) as reason:
        log.debug("a trainer is left out: %s", reason)
        return False


def keeps_apart(trial: Task, trainer: Trainer, chunk: int) -> bool:
    """Whether a trainer passes the check of isolation on this device, in the shapes of the run."""
    # A trainer that takes its clients by the unit is called with many units at a time, which must not meet either.
    width = chunk if trainer.unit is None else min(2, max(1, chunk // trainer.unit)) * trainer.unit
    passed = all(is_isolated(trainer, trial, size) for size in sorted({trainer.unit or chunk, width}))
    if not passed:
        log.info("trainer %s is left out: a client's update depends on its neighbours on this device", trainer.name)
    return passed


def _one_by_one(task: Task, streams: Streams, name: str) -> tuple[Trainer, str | None]:
    """Without a public bound, shapes would tell how much others hold: every client is its own program."""
    bound = "local.max_examples, a public bound on the examples of a client (or both local.steps and local.batch_size)"
    require(
        name in ("auto", "tiled-loop"),
        f"trainer is {name!r} in a secure run, which needs {bound}; or use trainer='auto'.",
    )
    note = f"the run is secure, so clients are trained one by one; give {bound} to train many at once."
    if task.device.type != "cpu":
        return Loop(task, streams), note
    return Parallel("tiled-loop", lambda: Loop(task.apart(), streams), 1, fixed=True), note


def _tile_bytes(budget: int | None) -> int:
    """A quarter of a budget for the tiles of all threads together; the rest is for updates."""
    return TILE_BYTES if budget is None else min(TILE_BYTES, budget // (4 * torch.get_num_threads()))


def _per_update(task: Task, size: Footprint) -> float:
    """Numbers that one client's local update computes, about."""
    steps = float(task.local.step_count(torch.tensor([size.rows])))
    return steps * size.rows * (size.activations + task.layout.dimension)


def _quickest(task: Task, makers: Makers, chunk: int) -> str:
    on_cpu = task.device.type == "cpu"
    clients, plan = sample(task, min(chunk, 4 * torch.get_num_threads()) if on_cpu else chunk)
    one_step = Schedule(plan.positions[:, :1], plan.weights[:, :1], torch.ones_like(plan.steps))
    key = (repr(task.model), task.layout, task.loss, one_step.positions.shape, task.device, task.precision, *makers)
    if key not in _remembered:
        times: dict[str, float] = {}
        for name, make in makers.items():
            try:
                times[name] = _time(task, make(), clients, one_step)
            except InputError as reason:
                log.debug("%s is left out: %s", name, reason)
        log.debug("seconds per step of %d clients: %s", len(clients), times)
        # Of candidates that are about equally quick the preferred one, so that two runs of the same work choose alike.
        _remembered[key] = next(name for name, seconds in times.items() if seconds <= ALIKE * min(times.values()))
    return _remembered[key]


def _time(task: Task, trainer: Trainer, clients: Tensor, plan: Schedule) -> float:
    """Seconds of one step of these clients: the best of four after what compiles and records, or less if they are slow."""
    w = task.layout.read(task.model).float().to(task.device)

    def once() -> float:
        began = time.perf_counter()
        trainer(w, clients, plan, 1)
        if task.device.type == "cuda":
            torch.cuda.synchronize(task.device)
        return time.perf_counter() - began

    try:
        warm = [once() for _ in range(1 if task.device.type == "cpu" else 2)]
        if warm[-1] > 2.0:
            return warm[-1]
        return min(once() for _ in range(4))
    except RuntimeError as error:
        # Out of memory, or a program that a CUDA graph can't hold: another trainer will do.
        if task.device.type == "cpu":
            raise
        log.debug("%s is left out: %s", trainer.name, error)
        return float("inf")
