"""One client after the other: slower, and right for any module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.batches import Schedule
from dpfedexp.inputs import Inputs, each
from dpfedexp.noise.streams import Streams
from dpfedexp.trainers.precision import arithmetic
from dpfedexp.trainers.stepping import INPUT, KEYS, Batch, Stepper, Take
from dpfedexp.trainers.task import Task, batches


class Loop:
    """One client after the other: slower, and right for any module."""

    name = "loop"
    unit = 1

    def __init__(self, task: Task, streams: Streams) -> None:
        self.task, self.streams = task, streams

    def __call__(
        self,
        w: Tensor,
        clients: Tensor,
        schedule: Schedule,
        round: int,
        correction: Tensor | None = None,
        rates: Tensor | None = None,
    ) -> Tensor:
        return self.parameters(w, clients, schedule, round, correction, rates).sub_(w)

    def parameters(
        self,
        w: Tensor,
        clients: Tensor,
        schedule: Schedule,
        round: int,
        correction: Tensor | None = None,
        rates: Tensor | None = None,
    ) -> Tensor:
        """w⁽ᵗ'τ⁾ of the clients, [n, d]."""
        out = torch.empty(len(clients), len(w), device=w.device)
        keys = self.task.keys(self.streams, round, clients)
        rates = self.task.rates(rates, round, len(clients))
        with arithmetic(self.task.precision, self.task.device):
            for row in range(len(clients)):
                at = slice(row, row + 1)
                own, rate, key = (None if rows is None else rows[at] for rows in (correction, rates, keys))
                self._one(w, clients[at], schedule.part(at), round, own, out[at], rate, key)
        return out

    def _one(
        self,
        w: Tensor,
        client: Tensor,
        one: Schedule,
        round: int,
        correction: Tensor | None,
        out: Tensor,
        rate: Tensor | None,
        keys: Tensor | None,
    ) -> None:
        """The parameters of one client into `out` [1, d], where they live meanwhile."""
        task = self.task
        batch_of = batches(task, client, one)
        stepper = Stepper(ByAutograd(task), task.layout, task.local)
        stepper.begin(w, one.steps, correction, uneven=False, into=out, rates=rate, keys=keys)
        # Whatever draws without a key, the federation's transform or a layer such as an LSTM with dropout, draws from the client's
        # own stream, whatever ran before it.
        with torch.random.fork_rng(devices=[task.device] if task.device.type == "cuda" else []):
            seed = self.streams.at("module", round).generator(int(client)).integers(2**63)
            torch.manual_seed(int(seed))
            for step in range(int(one.steps)):
                x, y, weights = batch_of(step)
                stepper.step(Batch({INPUT: x}, y, weights))


@dataclass(frozen=True)
class ByAutograd:
    """Gradients of a single client by torch's own backward pass, without the rows that only pad its batch."""

    task: Task

    def prepare(self, x: Inputs) -> dict[int, Inputs]:
        return {INPUT: x}

    def descend(
        self, params: Mapping[str, Tensor], fixed: Mapping[int, Inputs], targets: Tensor, weights: Tensor, take: Take
    ) -> None:
        real = weights[0] > 0
        leaves = {name: value[0].detach().requires_grad_() for name, value in params.items()}
        key = fixed[KEYS][0] if KEYS in fixed else None
        own = each(lambda value: value[0][real], fixed[INPUT])
        losses = self.task.losses(leaves, own, targets[0][real], key)
        grads = torch.autograd.grad((losses * weights[0][real]).sum(), list(leaves.values()), allow_unused=True)
        for (name, value), gradient in zip(leaves.items(), grads, strict=True):
            take(name, torch.zeros_like(value)[None] if gradient is None else gradient[None])
