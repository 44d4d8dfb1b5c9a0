"""Losses and metrics that clients compute on their own rows without training."""

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import vmap

from dpfedexp.core.client_metrics import WIDTH, ClientMetrics
from dpfedexp.core.local_optimizer import LocalOptimizer, Schedule, Sgd, as_rows, schedule
from dpfedexp.core.modules import Inputs, Params
from dpfedexp.core.noise import Streams
from dpfedexp.trainers.draws import seeded_generators
from dpfedexp.trainers.steps import Loop
from dpfedexp.trainers.task import Clients, Task, Trainer, batches, rows_of_one

PIECE = 64
"""How many rows of a client, and how many clients, are measured at once."""
MOST_ROWS = 512
"""The most rows of a client for its mean loss; a client with more rows uses a sample."""


def all_rows(most: int | None) -> LocalOptimizer:
    """An optimizer whose one batch has all rows that a client with this `max_examples` trains on, up to `MOST_ROWS`."""
    return Sgd(lr=1.0, steps=1, max_examples=min(most or MOST_ROWS, MOST_ROWS))


class ClientLosses:
    """Compute the mean loss of each client, at parameters of its own.

    In a secure run, `unit` clients are computed together in one tensor program, so that every program has the same
    shape. In other runs `unit` is None, and all given clients are computed together. Where clients are trained one by
    one, their losses are computed one by one too.
    """

    what = "losses"

    def __init__(self, task: Task, trainer: Trainer, streams: Streams, *, unit: int | None) -> None:
        self.task, self.streams, self.unit = task, streams, unit
        self.alone = trainer.unit == 1 or isinstance(trainer, Loop)
        # keep=0: these programs run only twice a round, so recording them for speed is not worth it.
        self.together = task.program(f"{self.what} of clients", vmap(self._one), batched=True, keep=0)
        self.one = task.program(f"{self.what} of a client", self._one, keep=0)

    def _one(self, params: Params, x: Inputs, y: Tensor, weights: Tensor, key: Tensor | None = None) -> Tensor:
        found = self.task.losses(params, x, y, key)
        return (found * as_rows(weights, found)).sum(0)

    def __call__(self, w: Tensor, rows: Tensor, clients: Tensor, plan: Schedule, round: int) -> Tensor:
        """Return each client's loss at its own parameters w + rows[i], [n], on its examples in `plan`; NaN becomes infinite."""
        task, size = self.task, 1 if self.alone else self.unit or len(rows)
        keys = task.keys(self.streams, round, clients)
        found = []
        with torch.no_grad(), task.arithmetic():
            for first in range(0, len(rows), size):
                at = slice(first, first + size)
                own = () if keys is None else (keys[at],)
                ask = self._asked_alone if self.alone else self._asked
                found.append(ask(w + rows[at], clients[at], plan.part(at), round, *own))
        return torch.nan_to_num(torch.cat(found), nan=torch.inf, posinf=torch.inf)

    def _asked(self, own: Tensor, clients: Tensor, plan: Schedule, round: int, *keys: Tensor) -> Tensor:
        x, y, weights = batches(self.task, clients, plan, self.streams, round)(0)
        return cast(Tensor, self.together(self.task.layout.unflatten(own), x, y, weights, *keys))

    def _asked_alone(self, own: Tensor, client: Tensor, plan: Schedule, round: int, *keys: Tensor) -> Tensor:
        """The loss of a single client. A module that draws without a key draws from the client's own stream."""
        seed = int(self.streams.at("module", round).generator(int(client)).integers(2**63))
        with seeded_generators(self.task.device, seed) if self.task.synthetic is None else nullcontext():
            x, y, weights = batches(self.task, client, plan, self.streams, round)(0)
            params = {name: value[0] for name, value in self.task.layout.unflatten(own).items()}
            rows = rows_of_one(self.task, x, y, weights)
            return cast(Tensor, self.one(params, *rows, *(key[0] for key in keys)))[None]


class ClientScores(ClientLosses):
    """Metric vectors of clients at released parameters, one row per client (`core.client_metrics`); zeros for one without rows.

    The model is in eval mode. In a secure run clients are measured one by one, in a public shape.
    """

    what = "metrics"

    def __init__(
        self, task: Task, trainer: Trainer, streams: Streams, metrics: ClientMetrics, rows: Clients, *, unit: int | None
    ) -> None:
        loss = task.loss

        def measured(outputs: Any, targets: Tensor) -> Tensor:
            return metrics.vectors(loss, outputs, targets)

        model = copy.deepcopy(task.model).eval()
        task = replace(task, model=model, loss=measured, clients=rows, copies=[])
        super().__init__(task, trainer, streams, unit=unit)
        self.metrics = metrics
        self.alone = self.alone or unit is not None

    def of_clients(self, w: Tensor, clients: Tensor, round: int) -> Tensor:
        """The metric vectors [n, WIDTH] of clients [n] at w [d]."""
        if self.unit is None and len(clients) > PIECE:
            return torch.cat([self.of_clients(w, part, round) for part in clients.split(PIECE)])
        sizes = self.task.clients.sizes[clients]
        found = torch.zeros(len(clients), WIDTH, device=w.device)
        holders = torch.nonzero(sizes > 0).flatten()
        if len(holders) == 0:
            return found
        who, draws = clients[holders], self.streams.at("evaluation", round).generators()
        numbers = who.tolist()
        plan = schedule(all_rows(None), sizes[holders], lambda row: draws(numbers[row]), public=self.unit is not None)
        still = torch.zeros(len(who), len(w), device=w.device)
        rows = torch.zeros(len(who), WIDTH, device=w.device)
        # A client's vector is a mean, so its rows may be measured in pieces that need no more memory than training.
        for first in range(0, plan.positions.shape[2], PIECE):
            at = slice(first, first + PIECE)
            piece = Schedule(plan.positions[:, :, at], plan.weights[:, :, at], plan.steps, plan.most)
            rows = rows + self(w, still, who, piece, round)
        rows = self.metrics.encode(torch.where(rows.isfinite().all(1, keepdim=True), rows, torch.zeros_like(rows)))
        found[holders.to(w.device)] = rows
        return found
