"""A module's fast programs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from dpfedexp.core.batches import Schedule, schedule
from dpfedexp.core.noise.streams import Streams
from dpfedexp.errors import InputError
from dpfedexp.machine import has_triton
from dpfedexp.trainers.checks import first_line
from dpfedexp.trainers.fast.convolution import Contract, ContractAndPool, LibraryConvolve, Patches
from dpfedexp.trainers.fast.ops import KEYS, Gradients, Op, Saved, Unsupported, multiplied
from dpfedexp.trainers.fast.program import Program, Step, objective
from dpfedexp.trainers.fast.trace import compile_module
from dpfedexp.trainers.steps import Batch, ByProgram, Vectorised
from dpfedexp.trainers.task import Precision, Task, arithmetic

ELSEWHERE = 0.03
"""How far from the model's parameters a program is tried too, in each of them."""
ATTEMPTS, NEAR = 3, 0.001
"""How often a program is tried at one place before it is called wrong, and how far from it, relative to each parameter."""
TOLERANCE: dict[Precision, float] = {"fp32": 0.01, "tf32": 0.1, "bf16": 0.2}
"""A wrong rule is off by the size of the result itself; rounding, and the places of near ties in a max-pool, are not."""


class Programs:
    """The module's programs, each held against `vmap` on two clients' data before it is trusted."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @cached_property
    def plain(self) -> Program:
        return self._checked(lambda: compile_module(self.task.model, self.task.layout.names))

    @cached_property
    def library(self) -> Program:
        """Convolutions behind the first by torch's library; patches of the data are made once."""

        def fused(step: Step, source: Step) -> Op | None:
            op, patches = step.op, source.op
            if source.output not in self.plain.trained or not isinstance(patches, Patches):
                return None
            if isinstance(op, ContractAndPool):
                return LibraryConvolve(op.window, op.bias, op.pool)
            return LibraryConvolve(patches.window, op.bias) if isinstance(op, Contract) else None

        found = _with_fused(self.plain, fused)
        if found is self.plain:
            raise InputError("the model has no convolution behind another layer.")
        return self._checked(lambda: found)

    @cached_property
    def fused(self) -> Program:
        """triton's kernels in place of patches and products."""
        found = _with_fused(self.plain, self._pooled) if has_triton() else self.plain
        if found is self.plain:
            raise InputError("the model has no layer that triton's kernels would speed up, or triton is not here.")
        # These kernels are made for one precision: each is held to what it stands for, within a network of exact values.
        self._checked(lambda: each_held(found, self.plain, self.task.precision))
        return found

    def _pooled(self, step: Step, source: Step) -> Op | None:
        from dpfedexp.trainers.fast import pooled_kernels as kernels

        if not isinstance(step.op, ContractAndPool):
            return None
        outputs, channels = self.task.model.get_parameter(step.params[0]).shape[:2]
        return kernels.pooled(step.op.window, step.op.pool, step.op.bias, outputs, channels, self.task.precision)

    def _checked(self, make: Callable[[], Program]) -> Program:
        """The same rules serve every precision and are held to float32."""
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
    # Behind a layer that begins at zero every gradient is zero, and a wrong one too: elsewhere it shows.
    elsewhere = start + ELSEWHERE * torch.randn(len(start), generator=torch.Generator().manual_seed(0)).to(start)
    weights = weights.to(task.device)
    keys = task.keys(Streams(0), 0, clients)
    exact = Vectorised(task if task.precision == "fp32" else replace(task, precision="fp32")).gradients
    core = by_program(task, program, "fp32")
    for w in (start, elsewhere):
        for attempt in range(ATTEMPTS):
            # Two ways to round may see another maximum among values that nearly tie; a wrong rule is wrong close to w too.
            draws = torch.randn(len(w), generator=torch.Generator().manual_seed(attempt)).to(w)
            near = w if attempt == 0 else w * (1 + NEAR * draws)
            params = task.layout.unflatten(near.to(task.device).repeat(len(clients), 1))
            with arithmetic("fp32", task.device):
                expected = exact.program(params, x, y, weights, *([] if keys is None else [keys]))
            found: dict[str, Tensor] = {}
            with torch.no_grad(), arithmetic("fp32", task.device):
                fixed = core.prepare(x) if keys is None else {**core.prepare(x), KEYS: keys}
                core.descend(params, Batch(fixed, y, weights), lambda name, g: found.update({name: multiplied(g)}))  # noqa: B023
            if (wrong := _differing(expected, found)) is None:
                break
        else:
            raise Unsupported(f"the rules give another gradient of {wrong!r}")


def _differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """The first parameter of which the gradients are not the same, None where all are."""
    for name, gradient in expected.items():
        scale = float(torch.linalg.vector_norm(gradient))
        off = float(torch.linalg.vector_norm(found[name].float() - gradient))
        if not off <= TOLERANCE["fp32"] * scale + 1e-6:
            return name
    return None


def _with_fused(program: Program, fused: Callable[[Step, Step], Op | None]) -> Program:
    """The program with one operation in place of two, of which the second alone reads the first, wherever `fused` has one."""
    readers = Counter(i for step in program.steps for i in step.inputs)
    made_by = {step.output: step for step in program.steps}
    gone: set[int] = set()
    steps: list[Step] = []
    for step in program.steps:
        source = made_by.get(step.inputs[0])
        op = fused(step, source) if source is not None and readers[source.output] == 1 else None
        if source is not None and op is not None:
            gone.add(source.output)
            step = Step(op, source.inputs, step.output, source.params + step.params)
        steps.append(step)
    return replace(program, steps=tuple(step for step in steps if step.output not in gone)) if gone else program


@dataclass(frozen=True)
class Held:
    """Computes by `first` and `second`, and raises `Unsupported` where `op`, in its precision, is far from them.

    What rounding moves grows with every layer. So each operation is compared on exact values, and hands exact ones on.
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
                self._compare(multiplied(mine), multiplied(exact))
        return of_params, of_inputs

    def _low(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [value.bfloat16() if self.precision == "bf16" else value for value in values]

    def _compare(self, found: Tensor, exact: Tensor) -> None:
        off, scale = (float(torch.linalg.vector_norm(value)) for value in (found.float() - exact, exact))
        if not off <= TOLERANCE[self.precision] * scale + 1e-6:
            raise Unsupported(f"{type(self.op).__name__} gives something else than {type(self.second).__name__}")


def each_held(program: Program, plain: Program, precision: Precision) -> Program:
    """The program with every operation that stands for two of the plain one's held to them."""
    made_by = {step.output: step for step in plain.steps}

    def held(step: Step) -> Step:
        second = made_by[step.output]
        if step.op is second.op:
            return step
        return replace(step, op=Held(step.op, made_by[second.inputs[0]].op, second.op, precision))

    return replace(program, steps=tuple(held(step) for step in program.steps))


def by_program(task: Task, program: Program, precision: Precision | None = None) -> ByProgram:
    precision = precision or task.precision
    program = program.rounded() if precision == "bf16" else program
    return ByProgram(program, objective(task.loss, task.synthetic), precision)


def sample(task: Task, count: int) -> tuple[Tensor, Schedule]:
    """The largest clients, and a plan for them."""
    sizes = task.clients.sizes
    count = min(count, int((sizes > 0).sum()))
    clients = torch.arange(count) if bool((sizes[0] == sizes).all()) else torch.topk(sizes, count).indices
    streams = Streams(0).at("batches", 0)
    return clients, schedule(task.local, sizes[clients], lambda row: streams.generator(int(clients[row])))
