"""The fast trainer: a chunk of clients through a hand-written program, each step in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.local import Schedule
from dpfedexp.simulation.fast.objective import Objective
from dpfedexp.simulation.fast.program import Program
from dpfedexp.simulation.fast.stepping import Batch, Capture, Recordings, Stepper, Take, cuda_graph
from dpfedexp.simulation.precision import Precision, arithmetic, low
from dpfedexp.simulation.vectorise import Task


@dataclass(frozen=True)
class ByProgram:
    """Gradients by a `Program`; in bf16 its values and products are, while parameters and their sums stay float32."""

    program: Program
    objective: Objective
    precision: Precision = "fp32"

    def prepare(self, x: Tensor) -> dict[int, Tensor]:
        return self.program.prepare(low(x, self.precision))

    def descend(
        self, params: Mapping[str, Tensor], fixed: Mapping[int, Tensor], targets: Tensor, weights: Tensor, take: Take
    ) -> None:
        used = params if self.precision != "bf16" else {name: p.bfloat16() for name, p in params.items()}
        self.program.descend(used, fixed, targets, weights, self.objective, take)


class Fast:
    """All clients of a chunk at once through a program of known layers, equal to the plain loop to rounding."""

    def __init__(
        self, task: Task, core: ByProgram, *, name: str = "fast", record: bool = False, capture: Capture = cuda_graph
    ) -> None:
        self.task, self.core, self.name = task, core, name
        fresh: Callable[[], Stepper] = lambda: Stepper(core, task.layout, task.local)  # noqa: E731
        self.recordings = Recordings(fresh, capture) if record else None
        self.fresh = fresh

    def __call__(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Tensor | None = None
    ) -> Tensor:
        n = len(clients)
        uneven = bool((schedule.steps != schedule.steps[0]).any())
        steps = schedule.steps.to(self.task.device) if uneven else None
        with torch.no_grad(), arithmetic(self.task.precision, self.task.device):
            batch_of = self._batches(clients, schedule)
            stepper = self.fresh()
            if self.recordings is not None:
                shape = tuple(schedule.positions.shape[::2])
                stepper = self.recordings.stepper((shape, uneven, correction is None))  # type: ignore[assignment]
            stepper.begin(w, n, correction)
            for step in range(schedule.longest):
                stepper.step(batch_of(step), None if steps is None else step < steps)
            return stepper.moved()

    def _batches(self, clients: Tensor, schedule: Schedule) -> Callable[[int], Batch]:
        def make(step: int) -> Batch:
            positions, weights = schedule.batch(step)
            x, y = self.task.clients.gather(clients, positions, self.task.device)
            return Batch(self.core.prepare(x), y, weights.to(self.task.device))

        if schedule.positions.shape[1] > 1:
            return make
        constant = make(0)
        return lambda step: constant
