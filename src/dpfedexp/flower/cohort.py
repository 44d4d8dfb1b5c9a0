"""One node that hosts many simulated clients and trains them as one tensor program.

For studying a large federation on few machines. The server then sees the sum over the node's clients, so whoever runs the node is
trusted with their reports: it is a simulation of those clients, not a protection of them. Against everybody else each of them has
the promise of a client, so they are trained apart, as in a secure run.
"""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Message, RecordDict
from torch import nn

from dpfedexp.algorithms import fedavg
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.losses import Loss
from dpfedexp.engine.prepare import prepare
from dpfedexp.errors import checked, require
from dpfedexp.flower.arrays import as_array, to_flat
from dpfedexp.flower.messages import HOSTED
from dpfedexp.flower.node.mod import MODEL, hosted_clients
from dpfedexp.flower.rate import at_round, check_rate
from dpfedexp.trainers.task import Clients


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
    asked = torch.tensor(hosted_clients(message))
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
