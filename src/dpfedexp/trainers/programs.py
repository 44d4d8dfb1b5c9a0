"""A module's fast programs, each held against `vmap` on two clients' data before it is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from dpfedexp.core.batches import Schedule, schedule
from dpfedexp.core.layout import Layout
from dpfedexp.core.noise.streams import Streams
from dpfedexp.errors import InputError
from dpfedexp.machine import has_triton
from dpfedexp.trainers.fast.held import TOLERANCE, each_held
from dpfedexp.trainers.fast.objective import objective
from dpfedexp.trainers.fast.ops import Unsupported, multiplied
from dpfedexp.trainers.fast.program import Program
from dpfedexp.trainers.fast.rewrite import by_library, with_relu_inside, without_patches, without_scatter
from dpfedexp.trainers.fast.trace import compile_module
from dpfedexp.trainers.precision import Precision, arithmetic
from dpfedexp.trainers.stepped import ByProgram
from dpfedexp.trainers.stepping import KEYS
from dpfedexp.trainers.task import Task, first_line
from dpfedexp.trainers.vectorised import Vectorised

ELSEWHERE = 0.03
"""How far from the model's parameters a program is tried too, in each of them."""
ATTEMPTS, NEAR = 3, 0.001
"""How often a program is tried at one place before it is called wrong, and how far from it, relative to each parameter."""


class Programs:
    """The module's programs, each held against `vmap` on two clients' data before it is trusted."""

    def __init__(self, task: Task) -> None:
        self.task = task

    @cached_property
    def plain(self) -> Program:
        return self._checked(lambda: with_relu_inside(compile_module(self.task.model, self.task.layout.names)))

    @cached_property
    def gathered(self) -> Program:
        """Large convolutions whose inputs' gradients are convolutions too; the plain program where there are none."""
        return self._checked(lambda: without_scatter(self.plain, again=False))

    @cached_property
    def lean(self) -> Program:
        """The same, with patches made again instead of kept."""
        found = without_scatter(self.plain, again=True)
        if len(found.steps) == len(self.plain.steps):
            raise InputError("the model has no convolution whose patches could be made again.")
        return self._checked(lambda: found)

    @cached_property
    def library(self) -> Program:
        """Convolutions behind the first by torch's library."""
        found = by_library(self.plain)
        if len(found.steps) == len(self.plain.steps):
            raise InputError("the model has no convolution behind another layer.")
        return self._checked(lambda: found)

    @cached_property
    def fused(self) -> Program:
        every = dict(self.task.model.named_parameters(remove_duplicate=False))
        shapes = Layout(tuple(every), tuple(value.shape for value in every.values()))
        found = without_patches(self.plain, shapes, self.task.precision) if has_triton() else None
        if found is None:
            raise InputError("the model has no layer that triton's kernels would speed up, or triton is not here.")
        # These kernels are made for one precision: each is held to what it stands for, within a network of exact values.
        self._checked(lambda: without_scatter(each_held(found, self.plain, self.task.precision), again=False))
        return without_scatter(found, again=False)

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
            params = task.layout.unflatten(_near(w, attempt).to(task.device).repeat(len(clients), 1))
            with arithmetic("fp32", task.device):
                expected = exact.program(params, x, y, weights, *([] if keys is None else [keys]))
            found: dict[str, Tensor] = {}
            with torch.no_grad(), arithmetic("fp32", task.device):
                fixed = core.prepare(x) if keys is None else {**core.prepare(x), KEYS: keys}
                core.descend(params, fixed, y, weights, lambda name, grad: found.update({name: multiplied(grad)}))  # noqa: B023
            if (wrong := _differing(expected, found)) is None:
                break
        else:
            raise Unsupported(f"the rules give another gradient of {wrong!r}")


def _near(w: Tensor, attempt: int) -> Tensor:
    """w itself, and at further attempts weights close to it, with its zeros: a wrong rule is wrong there too.

    Two ways to round may see another maximum among values that nearly tie, or another side of a ReLU.
    """
    if attempt == 0:
        return w
    draws = torch.randn(len(w), generator=torch.Generator().manual_seed(attempt))
    return w * (1 + NEAR * draws.to(w))


def _differing(expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str | None:
    """The first parameter of which the gradients are not the same, None where all are."""
    for name, gradient in expected.items():
        scale = float(torch.linalg.vector_norm(gradient))
        off = float(torch.linalg.vector_norm(found[name].float() - gradient))
        if not off <= TOLERANCE["fp32"] * scale + 1e-6:
            return name
    return None


def by_program(task: Task, program: Program, precision: Precision | None = None) -> ByProgram:
    precision = precision or task.precision
    return ByProgram(
        program.rounded() if precision == "bf16" else program, objective(task.loss, task.synthetic), precision
    )


def sample(task: Task, count: int) -> tuple[Tensor, Schedule]:
    """The largest clients, and a plan for them."""
    sizes = task.clients.sizes
    count = min(count, int((sizes > 0).sum()))
    clients = torch.arange(count) if bool((sizes[0] == sizes).all()) else torch.topk(sizes, count).indices
    streams = Streams(0).at("batches", 0)
    return clients, schedule(task.local, sizes[clients], lambda row: streams.generator(int(clients[row])))
