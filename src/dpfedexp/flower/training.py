"""One client's local training on its node: the simulator's own steps, applied to a module."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from dpfedexp.core.batches import schedule
from dpfedexp.core.layout import Layout
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.losses import Loss, resolve
from dpfedexp.core.noise.streams import Streams
from dpfedexp.data import Federation
from dpfedexp.errors import InputError, checked
from dpfedexp.flower.rate import check_rate
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.task import Task, check_task

_ROUND = 1


def fresh_shuffles() -> np.random.Generator:
    """Draws that nobody can repeat."""
    return np.random.default_rng()


@checked
def train_local(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    local: LocalOptimiser,
    loss: str | Loss | None = None,
    correction: Mapping[str, Tensor] | None = None,
    shuffles: np.random.Generator | None = None,
) -> None:
    """Trains a module in place as a client of the simulator trains: the same steps, batches, pull and correction.

    The module is trained in the mode and on the device that it is in. A client without rows learns nothing.

    Args:
        model: the module, with the global parameters in it.
        inputs: the client's rows.
        targets: one per row.
        local: the client's optimiser, such as `Sgd(lr=0.1, epochs=1, batch_size=32)`.
        loss: a name, or a function (outputs, targets) → one loss per example; by default the usual one for the targets.
        correction: DP-SCAFFOLD's c − c_i by parameter, which is added to every gradient.
        shuffles: where batches, and what a module draws, come from; by default the operating system.

    >>> from dpfedexp import Sgd
    >>> model = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> train_local(model, torch.ones(4, 1), torch.ones(4, 1), local=Sgd(lr=0.5, steps=2))
    >>> model.weight.item()
    0.75
    """
    check_rate(local)
    if local.schedule is not None:
        raise InputError(
            "local has a schedule, and train_local does not know the round; pass local=local_from(context.run_config, message), or "
            "local.in_round(round)."
        )
    if len(inputs) == 0:
        return
    client, layout = Federation.from_clients([(inputs, targets)]), Layout.of(model)
    device = next(iter(model.parameters())).device
    task = Task(model, layout, resolve(loss, targets), local, client, device)
    check_task(task)
    generator = fresh_shuffles() if shuffles is None else shuffles
    plan = schedule(local, client.sizes, lambda row: generator)
    pull = None
    if correction is not None:
        missing = [name for name in layout.names if name not in correction]
        if missing:
            raise InputError(f"correction has no {missing[0]!r}; it must have every parameter of the model.")
        pull = layout.flatten({name: correction[name].float().to(device) for name in layout.names})[None]
    w = layout.read(model).float()
    streams = Streams(int(generator.integers(2**62)))
    trained = Loop(task, streams).parameters(w, torch.zeros(1, dtype=torch.int64), plan, _ROUND, pull)
    layout.write(model, trained[0])
