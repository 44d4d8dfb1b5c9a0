"""A client's own loss, on the rows that it trains on: at the global model, and at its own after the local steps."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap

from dpfedexp.batches import Batching, Schedule
from dpfedexp.inputs import Inputs, each
from dpfedexp.layout import Params
from dpfedexp.noise.streams import Streams
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.precision import arithmetic
from dpfedexp.trainers.task import Task, Trainer

MOST_ROWS = 512
"""Rows of a client that its loss is a mean over; a client that holds more takes a sample of its own."""


@dataclass(frozen=True)
class AllRows(Batching):
    """One batch of all the rows that a client trains on in a round, as far as `MOST_ROWS` goes."""

    max_examples: int | None
    steps: int | None = 1
    epochs: int | None = None
    batch_size: int | None = None

    @staticmethod
    def of(local: Batching) -> AllRows:
        return AllRows(min(local.max_examples or MOST_ROWS, MOST_ROWS))


class ClientLosses:
    """Mean losses of clients at parameters of their own.

    With `apart` every client's is computed alone, so that it is the same bit for bit whoever else takes part.
    """

    def __init__(self, task: Task, trainer: Trainer, streams: Streams, *, apart: bool) -> None:
        self.task, self.streams = task, streams
        self.alone = apart or isinstance(trainer, Loop)
        self.together = vmap(self._one)

    def _one(self, params: Params, x: Inputs, y: Tensor, weights: Tensor, key: Tensor | None = None) -> Tensor:
        return (self.task.losses(params, x, y, key) * weights).sum()

    def __call__(self, w: Tensor, rows: Tensor, clients: Tensor, plan: Schedule, round: int) -> Tensor:
        """The losses at w + rows, [n], of which one that is not a number is infinite.

        Args:
            w: the global parameters [d].
            rows: how far each client went, [n, d].
            clients: their numbers, [n].
            plan: which of their rows count.
            round: for the draws of a module that draws, which are the same wherever the client stands.
        """
        task, (positions, weights) = self.task, plan.batch(0)
        params = task.layout.unflatten(w + rows)
        keys = task.keys(self.streams, round, clients)
        with torch.no_grad(), arithmetic(task.precision, task.device):
            if self.alone:
                each = [self._alone(params, positions, weights, n, clients, round, keys) for n in range(len(rows))]
                losses = torch.stack(each)
            else:
                x, y = task.clients.gather(clients, positions, task.device)
                losses = self.together(params, x, y, weights.to(task.device), *([] if keys is None else [keys]))
        return torch.nan_to_num(losses, nan=torch.inf)

    def _alone(
        self,
        params: Params,
        positions: Tensor,
        weights: Tensor,
        row: int,
        clients: Tensor,
        round: int,
        keys: Tensor | None,
    ) -> Tensor:
        """One client's. Whatever draws, the federation's transform or the module, draws from the client's own stream."""
        own, at, device = {name: value[row] for name, value in params.items()}, slice(row, row + 1), self.task.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(int(self.streams.at("module", round).generator(int(clients[row])).integers(2**63)))
            x, y = self.task.clients.gather(clients[at], positions[at], device)
            weight = weights[row].to(device)
            real = weight > 0
            mine = each(lambda value: value[0][real], x)
            return self._one(own, mine, y[0][real], weight[real], None if keys is None else keys[row])
