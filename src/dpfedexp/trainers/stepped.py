"""The trainer that moves a chunk of clients in place, and two ways to their gradients: a hand-written program, and vmap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dpfedexp.core.batches import Schedule
from dpfedexp.core.layout import Params
from dpfedexp.core.noise.streams import Streams
from dpfedexp.data.federation import Edition
from dpfedexp.inputs import Inputs
from dpfedexp.trainers.fast.objective import Objective
from dpfedexp.trainers.fast.program import Program
from dpfedexp.trainers.precision import Precision, low
from dpfedexp.trainers.stepping import (
    INPUT,
    KEYS,
    Batch,
    Capture,
    Core,
    Recording,
    Recordings,
    Stepper,
    Take,
    cuda_graph,
)
from dpfedexp.trainers.task import Clients, Task, batches


@dataclass(frozen=True)
class ByProgram:
    """Gradients by a `Program`; in bf16 its values and products are, while parameters and their sums stay float32."""

    program: Program
    objective: Objective
    precision: Precision = "fp32"

    def prepare(self, x: Inputs) -> dict[int, Inputs]:
        return self.program.prepare(low(x, self.precision))

    def descend(
        self, params: Mapping[str, Tensor], fixed: Mapping[int, Inputs], targets: Tensor, weights: Tensor, take: Take
    ) -> None:
        used = params if self.precision != "bf16" else {name: p.bfloat16() for name, p in params.items()}
        self.program.descend(used, fixed, targets, weights, self.objective, take)


@dataclass(frozen=True)
class ByVmap:
    """Gradients by `vmap(grad(loss))`, for any module that it can trace."""

    gradients: Callable[..., Params]

    def prepare(self, x: Inputs) -> dict[int, Inputs]:
        return {INPUT: x}

    def descend(
        self, params: Mapping[str, Tensor], fixed: Mapping[int, Inputs], targets: Tensor, weights: Tensor, take: Take
    ) -> None:
        keys = (fixed[KEYS],) if KEYS in fixed else ()
        for name, gradient in self.gradients(dict(params), fixed[INPUT], targets, weights, *keys).items():
            take(name, gradient)


@dataclass(frozen=True)
class Kept:
    """The one batch of all steps, for another round of the same clients: when it was made, for what, and from which data."""

    round: int
    asked: tuple[Tensor, ...]
    edition: Edition
    batch: Batch

    def serves(self, asked: tuple[Tensor, ...], edition: Edition | None) -> bool:
        return self.edition.same(edition) and all(map(torch.equal, asked, self.asked))


class Steps:
    """All clients of a chunk at once, their parameters moved in place; with `record`, each step is a recording that is replayed.

    A module that draws needs the run's `streams`.
    """

    unit = None

    def __init__(
        self,
        task: Task,
        name: str,
        core: Core,
        *,
        record: bool = False,
        capture: Capture = cuda_graph,
        streams: Streams | None = None,
    ) -> None:
        self.task, self.name, self.core, self.streams = task, name, core, streams
        self.recordings = Recordings(self._fresh, capture) if record else None
        self._kept: Kept | None = None
        self._crowded = -2

    def _fresh(self) -> Stepper:
        return Stepper(self.core, self.task.layout, self.task.optimiser)

    def __call__(
        self,
        w: Tensor,
        clients: Tensor,
        schedule: Schedule,
        round: int,
        correction: Tensor | None = None,
        rates: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """The updates, [n, d]; into `out` where it is given, in which the parameters then live meanwhile."""
        if self.recordings is not None and (more := self.recordings.width(len(clients)) - len(clients)):
            clients, schedule, correction, rates = _filled(more, clients, schedule, correction, rates)
            return self(w, clients, schedule, round, correction, rates)[: len(clients) - more]
        uneven = schedule.uneven
        rates = self.task.rates(rates, round, len(clients))
        with torch.no_grad(), self.task.arithmetic():
            batch_of = self._batches(clients, schedule, round)
            stepper = self._stepper((*schedule.positions.shape[::2], uneven, correction is None, rates is None))
            keys = self.task.keys(self.streams, round, clients)
            given: dict[str, Tensor] = {} if out is None else {"into": out}
            stepper.begin(w, schedule.steps, correction, uneven=uneven, rates=rates, keys=keys, **given)
            for step in range(schedule.longest):
                stepper.step(batch_of(step))
            return stepper.moved() if out is None else out.sub_(w)

    def _stepper(self, key: tuple[int | bool, ...]) -> Stepper | Recording:
        return self._fresh() if self.recordings is None else self.recordings.stepper(key)

    def _batches(self, clients: Tensor, schedule: Schedule, round: int) -> Callable[[int], Batch]:
        if schedule.positions.shape[1] > 1:
            return self._made(clients, schedule, round)
        asked, edition = (clients, schedule.positions, schedule.weights), _edition(self.task.clients)
        kept = self._kept
        if kept is None or not kept.serves(asked, edition):
            if kept is not None and kept.round == round:
                # Several chunks a round would only push one another out.
                self._crowded = round
            # The old batch goes before the new one comes.
            self._kept = kept = None
            batch = self._made(clients, schedule, round)(0)
            if edition is not None and round not in (self._crowded, self._crowded + 1):
                self._kept = Kept(round, tuple(part.clone() for part in asked), edition, batch)
        else:
            batch = kept.batch
        return lambda step: batch

    def _made(self, clients: Tensor, schedule: Schedule, round: int) -> Callable[[int], Batch]:
        """From a step to its batch."""
        gathered = batches(self.task, clients, schedule, self.streams, round)

        def make(step: int) -> Batch:
            x, y, weights = gathered(step)
            return Batch(self.core.prepare(x), y, weights)

        return make


def _edition(clients: Clients) -> Edition | None:
    """Of data that give the same rows whenever they are asked; None where their class does not say so."""
    known: Edition | None = getattr(clients, "edition", None) if hasattr(type(clients), "edition") else None
    return known


def _filled(
    more: int, clients: Tensor, plan: Schedule, correction: Tensor | None, rates: Tensor | None
) -> tuple[Tensor, Schedule, Tensor | None, Tensor | None]:
    """With so many repetitions of the last client, whose updates nobody uses."""

    def fill(rows: Tensor) -> Tensor:
        return torch.cat([rows, rows[-1:].expand(more, *rows.shape[1:])])

    filled = Schedule(fill(plan.positions), fill(plan.weights), fill(plan.steps), plan.most)
    own, rate = (None if rows is None else fill(rows) for rows in (correction, rates))
    return fill(clients), filled, own, rate
