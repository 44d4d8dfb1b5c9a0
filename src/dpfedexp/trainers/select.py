"""Selection of the trainer: the requested one, or the fastest by measurement.

A short run uses plain `vmap`. Otherwise each candidate trains a few clients for a few steps, in turn, and the best time of each
decides; the log has the times. A new trainer is a class that implements `Trainer`, and an entry in `TRAINERS`.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from dpfedexp.core.local_optimizer import Schedule, schedule
from dpfedexp.core.noise import Streams
from dpfedexp.errors import InputError, first_line, nearest, require
from dpfedexp.machine import has_triton
from dpfedexp.trainers.chunk_size import footprint
from dpfedexp.trainers.fast.convolution import ContractAndPool
from dpfedexp.trainers.fast.ops import KEYS, Gradients, Op, Saved, Unsupported, computed
from dpfedexp.trainers.fast.program import Program, ProgramStep, objective
from dpfedexp.trainers.fast.trace import compile_module
from dpfedexp.trainers.isolation import classes_of, is_isolated
from dpfedexp.trainers.recording import Unrecordable, refusal
from dpfedexp.trainers.steps import Batch, ByProgram, ByVmap, Loop, Parallel, Steps, Vectorized, cuda_graph
from dpfedexp.trainers.task import Precision, Task, Trainer, arithmetic, pair_of_clients

TRIAL_DISTANCE = 0.03
"""The distance from the model's parameters at which a program is checked a second time."""
ATTEMPTS, NEAR = 3, 0.001
"""How often a program is tried near a point before it counts as wrong, and how near, relative to each parameter."""
TOLERANCE: dict[Precision, float] = {"fp32": 0.01, "tf32": 0.1, "bf16": 0.2}
"""Largest relative error of a gradient. A wrong rule is off by the size of the gradient itself; rounding is not."""


class Programs:
    """The module's fast programs, each compared with `vmap` on two clients' data before it is used."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @cached_property
    def plain(self) -> Program:
        return self._checked(lambda: compile_module(self.task.model, self.task.layout.names))

    @cached_property
    def fused(self) -> Program:
        """The program with triton kernels in place of patches and products."""
        found = self._with_kernels() if has_triton() else self.plain
        if len(found.steps) == len(self.plain.steps):
            raise InputError("the trainer needs triton and a layer that its kernels speed up; use trainer='auto'.")
        # These kernels are made for one precision: each is compared with the operations it replaces, on exact inputs.
        self._checked(lambda: with_checked_ops(found, self.plain, self.task.precision))
        return found

    def _with_kernels(self) -> Program:
        """Replace patches and the product that reads them, `ContractAndPool`, by one operation."""
        from dpfedexp.trainers.fast import pooled_kernels as kernels

        steps = {step.output: step for step in self.plain.steps}
        for step in self.plain.steps:
            if isinstance(step.op, ContractAndPool):
                outputs, channels = self.task.model.get_parameter(step.params[0]).shape[:2]
                op = kernels.pooled(step.op.window, step.op.pool, step.op.bias, outputs, channels, self.task.precision)
                if op is not None:
                    steps[step.output] = replace(step, op=op, inputs=steps.pop(step.inputs[0]).inputs)
        return replace(self.plain, steps=tuple(steps.values()))

    def _checked(self, make: Callable[[], Program]) -> Program:
        """Make a program and compare it with `vmap` in float32; the rules are the same for every precision."""
        try:
            program = make()
            _check(self.task, program)
        except (InputError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            reason = error if isinstance(error, Unsupported) else first_line(error)
            raise InputError(f"the model has no fast program: {reason}. Use trainer='auto'.") from None
        return program


def _check(task: Task, program: Program) -> None:
    clients, plan = sample(task, 2)
    positions, weights = plan.batch(0)
    x, y = task.gather(clients, positions)
    if not isinstance(x, Tensor):
        raise Unsupported("a module with several inputs")
    start = task.layout.read(task.model).float()
    # Behind a layer that is initialized to zero every gradient is zero, even a wrong one, so a second point is needed.
    elsewhere = start + TRIAL_DISTANCE * torch.randn(len(start), generator=torch.Generator().manual_seed(0)).to(start)
    weights = weights.to(task.device)
    keys = task.keys(Streams(0), 0, clients)
    exact = Vectorized(task if task.precision == "fp32" else replace(task, precision="fp32")).gradients
    core = by_program(task, program, "fp32")
    for w in (start, elsewhere):
        for attempt in range(ATTEMPTS):
            # Rounding may select another maximum among values that nearly tie; a wrong rule is wrong at nearby points too.
            draws = torch.randn(len(w), generator=torch.Generator().manual_seed(attempt)).to(w)
            near = w if attempt == 0 else w * (1 + NEAR * draws)
            params = task.layout.unflatten(near.to(task.device).repeat(len(clients), 1))
            with arithmetic("fp32", task.device):
                expected = exact.program(params, x, y, weights, *([] if keys is None else [keys]))
            found: dict[str, Tensor] = {}
            with torch.no_grad(), arithmetic("fp32", task.device):
                fixed = core.prepare(x) if keys is None else {**core.prepare(x), KEYS: keys}
                core.descend(params, Batch(fixed, y, weights), lambda name, g: found.update({name: computed(g)}))  # noqa: B023
            wrong = [name for name, gradient in expected.items() if _differs(found[name], gradient, "fp32")]
            if not wrong:
                break
        else:
            raise Unsupported(f"the rules give another gradient of {wrong[0]!r}")


def _differs(found: Tensor, exact: Tensor, precision: Precision) -> bool:
    off, scale = (float(torch.linalg.vector_norm(value)) for value in (found.float() - exact, exact))
    return not off <= TOLERANCE[precision] * scale + 1e-6


@dataclass(frozen=True)
class CheckedOp:
    """Compute `first` and `second`, and raise `Unsupported` if the fused `op` differs from them.

    Rounding errors grow with every layer. So each operation is compared on exact values, and passes exact values on.
    """

    op: Op
    first: Op
    second: Op
    precision: Precision

    def forward(self, params: Sequence[Tensor], *inputs: Tensor) -> tuple[Tensor, Saved]:
        between, of_first = self.first.forward((), *inputs)
        y, of_second = self.second.forward(params, between)
        found, saved = self.op.forward(self._low(params), *self._low(inputs))
        self._compare(found, y)
        return y, (of_first, of_second, saved)

    def backward(self, params: Sequence[Tensor], saved: Saved, dy: Tensor, wanted: bool) -> Gradients:
        of_first, of_second, kept = saved
        of_params, (between,) = self.second.backward(params, of_second, dy, wanted)
        of_inputs = self.first.backward((), of_first, between, wanted)[1] if between is not None else (None,)
        own_params, own_inputs = self.op.backward(self._low(params), kept, self._low([dy])[0], wanted)
        for mine, exact in zip((*own_params, *own_inputs), (*of_params, *of_inputs), strict=True):
            if mine is not None and exact is not None:
                self._compare(computed(mine), computed(exact))
        return of_params, of_inputs

    def _low(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [value.bfloat16() if self.precision == "bf16" else value for value in values]

    def _compare(self, found: Tensor, exact: Tensor) -> None:
        if _differs(found, exact, self.precision):
            raise Unsupported(f"{type(self.op).__name__} gives something else than {type(self.second).__name__}")


def with_checked_ops(program: Program, plain: Program, precision: Precision) -> Program:
    made_by = {step.output: step for step in plain.steps}

    def held(step: ProgramStep) -> ProgramStep:
        second = made_by[step.output]
        if step.op is second.op:
            return step
        return replace(step, op=CheckedOp(step.op, made_by[second.inputs[0]].op, second.op, precision))

    return replace(program, steps=tuple(held(step) for step in program.steps))


def by_program(task: Task, program: Program, precision: Precision | None = None) -> ByProgram:
    precision = precision or task.precision
    program = program.rounded() if precision == "bf16" else program
    return ByProgram(program, objective(task.loss, task.synthetic), precision)


def sample(task: Task, count: int) -> tuple[Tensor, Schedule]:
    """The `count` largest clients with rows, and a schedule for them."""
    sizes = task.clients.sizes
    count = min(count, int((sizes > 0).sum()))
    clients = torch.arange(count) if bool((sizes[0] == sizes).all()) else torch.topk(sizes, count).indices
    streams = Streams(0).at("batches", 0)
    return clients, schedule(task.local, sizes[clients], lambda row: streams.generator(int(clients[row])))


log = logging.getLogger("dpfedexp")

AUTO, LOOP = "auto", "loop"
TILE_BYTES = 32 * 2**20
"""Bytes of the activations of one tile: more does not fit a cache, less has too much overhead. Best of 16, 32 and 64 MB."""
WORTH_MEASURING = 5 * 10**7
"""How many floating-point numbers a run must compute for a comparison of trainers; a smaller run is over sooner."""

ALIKE = 1.05
"""Candidates within this factor of the fastest count as equally fast."""
STEPS, TURNS, HOPELESS, SLOW = 2, 4, 2.0, 2.0
"""Local steps of a trial, and the trials of each candidate. A candidate gets no further trial if it was `HOPELESS` times slower
than the fastest one, or took more than `SLOW` seconds."""
LOOPED = 2
"""How many clients the loop is timed on if a GPU takes a whole chunk at once; its time is proportional to their number."""

_remembered: dict[object, str] = {}
Makers = dict[str, Callable[[], Trainer]]


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer is made from: activations of `tile` clients fit a CPU's cache, of `tile_of(rows)` if they have fewer rows."""

    task: Task
    streams: Streams
    programs: Programs
    tile: int
    tile_of: Callable[[int], int] | None = None

    @property
    def fixed(self) -> bool:
        """Whether the run is isolated, so that shapes must depend on no client."""
        return self.task.synthetic is not None


def _by_program(name: str, which: str) -> Callable[[TrainerParts], Trainer]:
    def make(parts: TrainerParts) -> Trainer:
        core, on_cpu = by_program(parts.task, getattr(parts.programs, which)), parts.task.device.type == "cpu"
        steps = Steps(parts.task, name, core, record=None if on_cpu else cuda_graph, streams=parts.streams)
        return Parallel(name, lambda: steps, parts.tile, fixed=parts.fixed, tile_of=parts.tile_of) if on_cpu else steps

    return make


def _recorded_vectorized(parts: TrainerParts) -> Trainer:
    gradients = Vectorized(parts.task).gradients
    core = ByVmap(gradients.program if parts.task.synthetic is None else gradients)
    return Steps(parts.task, "recorded-vectorized", core, record=cuda_graph, streams=parts.streams)


def _tiled_vectorized(parts: TrainerParts) -> Trainer:
    # A module draws from its clients' keys or not at all (vmap refuses other draws), so it may run on several threads.
    own = lambda: Vectorized(parts.task.copy_for_thread(), record=False, streams=parts.streams)  # noqa: E731
    return Parallel("tiled-vectorized", own, parts.tile, fixed=parts.fixed, tile_of=parts.tile_of)


def _tiled_loop(parts: TrainerParts) -> Trainer:
    own = lambda: Loop(parts.task.copy_for_thread(), parts.streams, keyed=True)  # noqa: E731
    return Parallel("tiled-loop", own, 1, fixed=parts.fixed)


TRAINERS: dict[str, tuple[Callable[[TrainerParts], Trainer], tuple[str, ...]]] = {
    "fused": (_by_program("fused", "fused"), ("cuda",)),
    "fast": (_by_program("fast", "plain"), ("cpu", "cuda")),
    "recorded-vectorized": (_recorded_vectorized, ("cuda",)),
    "tiled-vectorized": (_tiled_vectorized, ("cpu",)),
    "tiled-loop": (_tiled_loop, ("cpu",)),
    "vectorized": (lambda p: Vectorized(p.task, streams=p.streams), ("cpu", "cuda")),
}
"""The factory of each trainer that takes several clients at once, and the device types that have it, in order of preference."""


def trainer_names() -> tuple[str, ...]:
    """The names that `Execution.trainer` accepts: "auto" measures, "loop" is correct for any module."""
    return (AUTO, LOOP, *TRAINERS)


def check_trainer(name: object) -> None:
    if not isinstance(name, str) or name not in trainer_names():
        raise InputError(f"trainer is {name!r}, which does not exist.{nearest(str(name), trainer_names())}")


def makers(parts: TrainerParts) -> Makers:
    return {
        name: lambda make=make: make(parts)  # type: ignore[misc]
        for name, (make, devices) in TRAINERS.items()
        if parts.task.device.type in devices
    }


def trainer_again(name: str, device_type: str) -> str:
    """The trainer with which an interrupted run resumes: the same, or "auto" if this device does not have it."""
    return name if name == LOOP or device_type in TRAINERS.get(name, (None, ()))[1] else AUTO


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
    """Return the trainer, and a note for the user if it is slower than they might expect, otherwise None.

    Args:
        chunk: the number of clients that are trained together.
        updates: clients times rounds, to decide whether measuring is worthwhile.
        budget: bytes that a chunk may take.
        trial: in an isolated run, the same task with synthetic clients. Everything is tried on them, and a trainer is chosen only
            if it keeps clients apart.
    """
    trainer, note = _selected(task, streams, name, chunk, updates, budget, trial)
    alike = trial is None or trainer.unit != 1 or passes_isolation(trial, Loop(trial, streams), 2)
    why = "on this device training a client twice gives different updates"
    require(alike, f"{why}; a secure run needs another device, or a model without nondeterministic operations.")
    return trainer, note


def _selected(
    task: Task, streams: Streams, name: str, chunk: int, updates: float, budget: int | None, trial: Task | None
) -> tuple[Trainer, str | None]:
    check_trainer(name)
    isolated, on = trial is not None, trial or task
    if name == "loop":
        return Loop(task, streams), None
    if (reason := _why_not_together(on, streams)) is not None:
        if name != "auto":
            raise InputError(f"the model can't be vectorized over clients: {reason}. Use trainer='loop' or 'auto'.")
        return Loop(task, streams), (
            f"the model can't be vectorized over clients ({reason}); training them one after the other instead, "
            "which is usually 10 to 100 times slower."
        )
    size = footprint(on)
    # A quarter of a budget is for the tiles of all threads together; the rest is for updates.
    room = TILE_BYTES if budget is None else min(TILE_BYTES, budget // (4 * torch.get_num_threads()))
    tile = size.tile(room)
    if isolated:
        tile = max(1, min(tile, -(-chunk // (2 * torch.get_num_threads()))))
    tile_of = lambda rows: replace(size, rows=min(rows, size.rows)).tile(room)  # noqa: E731
    programs = Programs(on)
    candidates, offered = (makers(TrainerParts(which, streams, programs, tile, tile_of)) for which in (on, task))
    if name != "auto":
        require(name in offered, f"trainer is {name!r}, which a device of type {task.device.type!r} does not have.")
        require(
            not isolated or _can_be_isolated(on, candidates[name], chunk, name),
            f"trainer is {name!r}, but on this device a client's update then depends on other clients of its chunk, which a "
            "secure run does not allow. Use trainer='auto'.",
        )
        return offered[name](), None
    steps = float(on.local.step_count(torch.tensor([size.rows])))
    per_update = steps * size.rows * (size.activations + on.layout.dimension)
    brief = updates * per_update < WORTH_MEASURING
    if on.device.type == "cpu" and not brief:
        # Threads that each take a tile of clients beat threads that share every operation.
        candidates.pop("vectorized")
    if tile == 1:
        # vmap over a single client is the loop with more overhead.
        candidates.pop("tiled-vectorized", None)
    if brief:
        candidates = {"vectorized": candidates.pop("vectorized"), **candidates}
    if on.device.type != "cpu" and not brief:
        candidates[LOOP] = lambda: Loop(on, streams)
    while candidates:
        # A short run takes the first candidate.
        chosen = next(iter(candidates)) if brief else _quickest(on, candidates, chunk, tile)
        if not isolated or _can_be_isolated(on, candidates.pop(chosen), chunk):
            return (Loop(task, streams) if chosen == LOOP else offered[chosen]()), None
    return Loop(task, streams), (
        "on this device no trainer that takes several clients at once keeps them apart bit for bit; training them one after "
        "the other instead, because the run is secure."
    )


def _why_not_together(task: Task, streams: Streams) -> str | None:
    """Why `torch.func.vmap` can't trace the module, tried on two clients; None if it can."""
    for name, module in task.model.named_modules():
        if module.training and isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"layer {name!r} ({type(module).__name__}) mixes the examples of a batch"
    trainer = Vectorized(task, streams=streams)
    x, y = pair_of_clients(task)
    params = task.layout.unflatten(task.layout.read(task.model).float().to(task.device).repeat(2, 1))
    try:
        keys = task.keys(streams, 0, torch.arange(2))
        weights = torch.full((2, 2), 0.5, device=task.device)
        trainer.gradients.program(params, x, y, weights, *([] if keys is None else [keys]))
    except Exception as error:
        reason = first_line(error)
        if "data-dependent control flow" in reason:
            return "it looks at values while it runs: .item(), bool() or an `if` on a tensor"
        if "called random operation" in reason:
            return "it draws random numbers within an operation of torch, such as Tensor.uniform_()"
        return reason
    return None


def _can_be_isolated(trial: Task, make: Callable[[], Trainer], chunk: int, named: str | None = None) -> bool:
    """Whether a trainer can be made and keeps clients apart. An error means False, or is raised if the user `named` it."""
    try:
        return passes_isolation(trial, make(), chunk)
    except (InputError, RuntimeError) as reason:
        if isinstance(reason, Unrecordable) and named is not None:
            raise refusal(f"with trainer {named!r} the model or its loss", reason) from None
        if named is not None:
            raise
        log.debug("a trainer is left out: %s", reason)
        return False


def passes_isolation(trial: Task, trainer: Trainer, chunk: int) -> bool:
    # A trainer with a unit is called with many units at a time, which must not affect one another either.
    unit = trainer.unit or chunk
    several = chunk if trainer.unit is None else min(2, max(1, chunk // unit)) * unit
    largest, *others = classes_of(trial)
    shapes = [*((size, largest) for size in sorted({unit, several})), *((unit, rows) for rows in others)]
    passed = all(is_isolated(trainer, trial, size, rows) for size, rows in shapes)
    if not passed:
        log.info("trainer %s is left out: a client's update depends on its neighbors on this device", trainer.name)
    return passed


def _quickest(task: Task, makers: Makers, chunk: int, tile: int) -> str:
    on_cpu = task.device.type == "cpu"
    # On a CPU a few clients for every thread, but enough for a tensor program over several of them to pay off.
    few = torch.get_num_threads() * max(4, min(tile, 16))
    clients, plan = sample(task, min(chunk, few) if on_cpu else chunk)
    # More than one step, because values that depend on the data alone are computed once for all steps.
    count = min(STEPS, plan.longest)
    trial = Schedule(plan.positions[:, :count], plan.weights[:, :count], torch.full_like(plan.steps, count))
    loss = getattr(task.loss, "__qualname__", repr(task.loss))
    work = (loss, repr(task.model), task.layout, task.local, trial.positions.shape, count, task.precision)
    key = repr((*work, *makers, task.device, torch.get_num_threads()))
    chosen = _remembered.get(key, "")
    try:
        makers[chosen]()
    except (KeyError, InputError):
        # Not measured yet, or the network's `forward` has changed since.
        times = _compared(task, makers, clients, trial)
        # Among about equally fast candidates take the preferred one, so that two equal runs choose the same trainer.
        best = min(times.values(), default=0.0)
        chosen = next((name for name, seconds in times.items() if seconds <= ALIKE * best), next(iter(makers)))
        shown = ", ".join(f"{name} {seconds:.4g}" for name, seconds in times.items())
        log.info("trainer %s: seconds of %d clients and %d steps: %s", chosen, len(clients), count, shown)
    _remembered[key] = chosen
    return chosen


def _compared(task: Task, makers: Makers, clients: Tensor, plan: Schedule) -> dict[str, float]:
    """Seconds of these clients' first steps by every candidate that supports them: the best of a few alternating tries."""
    made: dict[str, Trainer] = {}
    times: dict[str, float] = {}
    for name, make in makers.items():
        try:
            made[name] = make()
            times[name] = _time(task, made[name], clients, plan)
        except (InputError, RuntimeError) as reason:
            if task.synthetic is None and not isinstance(reason, InputError):
                raise
            log.debug("%s is left out: %s", name, reason)
    for _ in range(TURNS - 1):
        for name, trainer in made.items():
            if name in times and times[name] <= min(SLOW, HOPELESS * min(times.values())):
                times[name] = min(times[name], _time(task, trainer, clients, plan, warm=True))
    return times


def _time(task: Task, trainer: Trainer, clients: Tensor, plan: Schedule, *, warm: bool = False) -> float:
    """Seconds of the schedule's steps of these clients, after compilation and recording unless `warm`."""
    w = task.layout.read(task.model).float().to(task.device)
    on_cpu = task.device.type == "cpu"
    # The loop's time is proportional to the number of clients: a few are enough to measure it.
    few = LOOPED if trainer.unit == 1 and not on_cpu else len(clients)
    at = slice(0, min(few, len(clients)))

    def once() -> float:
        began = time.perf_counter()
        trainer(w, clients[at], plan.part(at), 1)
        if not on_cpu:
            torch.cuda.synchronize(task.device)
        return (time.perf_counter() - began) * len(clients) / len(clients[at])

    try:
        seconds = once()
        for _ in range(0 if warm else 1 if on_cpu else 2):
            # The first call on a GPU records, so its time does not count.
            seconds = once() if seconds < SLOW or not on_cpu else seconds
        return seconds
    except RuntimeError as error:
        # Out of memory, or a program that a CUDA graph can't capture: another trainer is used.
        if on_cpu:
            raise
        log.debug("%s is left out: %s", trainer.name, error)
        return float("inf")
