"""The plain loop over clients."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpfedexp.core.batches import Schedule
from dpfedexp.core.layout import Params
from dpfedexp.core.noise.streams import Streams
from dpfedexp.inputs import Inputs
from dpfedexp.trainers.fast.ops import INPUT, KEYS
from dpfedexp.trainers.module_state import drawing_alike
from dpfedexp.trainers.steps import Batch, Stepper, Take
from dpfedexp.trainers.task import Rows, Task, batches, of_one


class Loop:
    """One client after the other: slower, and right for any module."""

    name = "loop"
    unit = 1

    def __init__(self, task: Task, streams: Streams, *, keyed: bool = False) -> None:
        # With `keyed` all that the module draws comes from its clients' keys, as `vmap` wants it, and no generator is seeded.
        self.task, self.streams = task, streams
        self.seeds = not keyed and task.synthetic is None

    def __call__(self, w: Tensor, *given: Any, **named: Any) -> Tensor:
        return self.parameters(w, *given, **named).sub_(w)

    def parameters(
        self, w: Tensor, clients: Tensor, schedule: Schedule, round: int, correction: Rows = None, rates: Rows = None
    ) -> Tensor:
        """w⁽ᵗ'τ⁾ of the clients, [n, d]."""
        out = torch.empty(len(clients), len(w), device=w.device)
        keys = self.task.keys(self.streams, round, clients)
        rates = self.task.rates(rates, round, len(clients))
        with self.task.arithmetic():
            for row in range(len(clients)):
                at = slice(row, row + 1)
                own = [None if rows is None else rows[at] for rows in (correction, rates, keys)]
                self._one(w, clients[at], schedule.part(at), round, out[at], own)
        return out

    def _one(self, w: Tensor, client: Tensor, one: Schedule, round: int, out: Tensor, own: Sequence[Rows]) -> None:
        """The parameters of one client into `out` [1, d], where they live meanwhile; `own` are its correction, rate and key."""
        task = self.task
        if task.synthetic is not None and not task.local.shape_is_public:
            one = one.in_own_shape()
        batch_of = batches(task, client, one, self.streams, round)
        stepper = Stepper(ByAutograd(task), task.layout, task.optimiser)
        stepper.begin(w, one.steps, *own, uneven=False, into=out)
        # What draws without a key, such as a module that uses NumPy, draws from the client's own stream.
        seed = int(self.streams.at("module", round).generator(int(client)).integers(2**63))
        with drawing_alike(task.device, seed) if self.seeds else nullcontext():
            for step in range(int(one.steps)):
                x, y, weights = batch_of(step)
                stepper.step(Batch({INPUT: x}, y, weights))


@dataclass(frozen=True)
class ByAutograd:
    """Gradients of a single client by torch's own backward pass, in a simulation without the rows that only pad its batch."""

    task: Task

    def prepare(self, x: Inputs) -> dict[int, Inputs]:
        return {INPUT: x}

    def descend(self, params: Params, batch: Batch, take: Take) -> None:
        own = {name: value[0] for name, value in params.items()}
        key = (batch.fixed[KEYS][0],) if KEYS in batch.fixed else ()
        rows = of_one(self.task, batch.fixed[INPUT], batch.targets, batch.weights)
        plain = self.task.synthetic is None
        program = self.gradients if plain else self.task.program("gradients of a client", self.gradients)
        for name, gradient in program(own, *rows, *key).items():
            take(name, gradient[None])

    def gradients(self, params: Params, x: Inputs, y: Tensor, weights: Tensor, *key: Tensor) -> Params:
        """Of the weighted loss, in the parameters of one client."""
        with torch.enable_grad():
            leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
            losses = self.task.losses(leaves, x, y, *key)
            found = torch.autograd.grad((losses * weights).sum(), list(leaves.values()), allow_unused=True)
        return {
            name: torch.zeros_like(value) if gradient is None else gradient
            for (name, value), gradient in zip(leaves.items(), found, strict=True)
        }
