"""Local training on a node with the simulator's own steps: one client's, or that of many clients that the node hosts.

Hosting is for studying a large federation on few machines. The server then sees the sum over the node's clients, so whoever runs
the node is trusted with their reports: it is a simulation of those clients, not a protection of them. Against all others each of
them has the promise of a client, so they are trained apart, as in a secure run.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import Tensor, nn

from dpfedexp.core.batches import schedule
from dpfedexp.core.layout import Layout
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.losses import Loss, resolve
from dpfedexp.core.noise.streams import Streams
from dpfedexp.data import Federation
from dpfedexp.errors import InputError, checked, require
from dpfedexp.flower.messages import HOSTED, MODEL, Request, as_array, at_round, check_rate, to_flat
from dpfedexp.trainers.loop import Loop
from dpfedexp.trainers.task import Clients, Task, check_task


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
    trained = Loop(task, streams).parameters(w, torch.zeros(1, dtype=torch.int64), plan, 1, pull)
    layout.write(model, trained[0])


@checked
def train_hosted(
    message: Message, model: nn.Module, clients: Clients, *, local: LocalOptimiser, loss: str | Loss | None = None
) -> RecordDict:
    """The content of an app's reply for the hosted clients that the message asks for.

    Args:
        message: the server's, with the model and the numbers of the clients.
        model: a module of the same layout.
        clients: all that the node hosts.
        local: the clients' optimiser.
        loss: a name, or a function (outputs, targets) → one loss per example; by default the usual one for the targets.

    Returns:
        One row per client that was asked for, for `private_training`, which clips and adds them.
    """
    # Here, because an app's process is new for every message, and one client's training needs less of the library.
    from dpfedexp.algorithms import fedavg
    from dpfedexp.engine.prepare import prepare

    asked = torch.tensor(Request.from_message(message).clients)
    require(
        len(asked) > 0 and int(asked.max()) < len(clients),
        f"the server asks for hosted client {int(asked.max())}, but this node hosts {len(clients)}; clients_per_node is the "
        "same number on the server and in the node's configuration.",
    )
    check_rate(local)
    local = at_round(local, message)
    simulation, _ = prepare(model, clients, fedavg(), local=local, rounds=1, loss=loss, isolated=True)
    w = to_flat(message.content.array_records[MODEL], simulation.task.layout, torch.float32).to(simulation.task.device)
    state = simulation.begin()
    rows = [simulation.updates(state, w, chunk, 1)[: len(chunk)].cpu() for chunk in asked.split(simulation.chunk_size)]
    return RecordDict({HOSTED: ArrayRecord({"rows": as_array(torch.cat(rows).numpy())})})
