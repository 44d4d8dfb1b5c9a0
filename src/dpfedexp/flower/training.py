"""Local training on a node with the simulator's code, for one client or many.

Several clients per node are for studying a large federation on few machines. The server sees the sum over them, so the node's
operator is trusted with their reports: this simulates those clients and does not protect them from their node. Against all
others each of them has the promise of a client, so they are trained apart, as in a secure run.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from dpfedexp.algorithms.probe import RATE, SCALE, UPDATE
from dpfedexp.algorithms.round import State
from dpfedexp.core.client_metrics import EVALUATION, ClientMetrics
from dpfedexp.core.local_optimizer import LocalOptimizer, schedule
from dpfedexp.core.local_rate import IMPROVED, PRIOR_RATE
from dpfedexp.core.losses import Loss, resolve
from dpfedexp.core.modules import Layout
from dpfedexp.core.noise import Streams
from dpfedexp.data import Federation
from dpfedexp.engine.engine import ANCHOR, LOCAL_RATE, Request
from dpfedexp.errors import InputError, checked, require
from dpfedexp.flower.app_settings import evaluation_from, local_from
from dpfedexp.flower.messages import ANCHOR_MODEL, BALLOTS, CORRECTION, MODEL, ROWS, NodeRequest, as_array, to_flat
from dpfedexp.trainers.steps import Loop
from dpfedexp.trainers.task import Clients, Task, check_task, one_row

if TYPE_CHECKING:
    from dpfedexp.engine.simulated import Simulation


def fresh_streams() -> Streams:
    """Unpredictable random streams for one message."""
    return Streams(secrets.randbits(62))


def fresh_shuffles() -> np.random.Generator:
    """An unpredictable random generator."""
    return np.random.default_rng()


@checked
def train_local(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    local: LocalOptimizer,
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
        local: the client's optimizer, such as `Sgd(lr=0.1, epochs=1, batch_size=32)`.
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
    require(
        not local.automatic,
        "local lr is 'auto', which takes votes; return dpfedexp.flower.answer(…) from the app's train function, or give a number.",
    )
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
def answer(
    message: Message,
    context: Context,
    model: nn.Module,
    clients: Clients | tuple[Tensor, Tensor],
    *,
    local: LocalOptimizer | None = None,
    loss: str | Loss | None = None,
) -> Message:
    """A client's whole answer to a server's message: an update, a vote, or an evaluation of the model.

    Return it from the app's train function; `private_training` clips it, adds what the mechanism asks for, and sends it. With an
    automatic rate, a client whose loss rose in its local steps sends a zero update.

    Args:
        message: the server's.
        context: Flower's, for the run's configuration.
        model: a module of the server's layout, on the device to train on; its parameters are replaced by the server's.
        clients: the client's (inputs, targets); a `Federation` of all of the node's clients where it has many.
        local: the clients' optimizer; by default the configuration's.
        loss: a name, or a function (outputs, targets) → one loss per example; by default the usual one for the targets.
    """
    request = NodeRequest.from_message(message)
    optimizer = local_from(context.run_config) if local is None else local
    asked, layout = torch.tensor(request.clients or (0,)), Layout.of(model)
    w = to_flat(message.content.array_records[MODEL], layout, torch.float32)
    layout.write(model, w)
    held: Clients | None = None
    if not isinstance(clients, tuple):
        held = clients
    elif len(clients[1]):
        held = Federation.from_clients([clients])
    metrics, share = evaluation_from(context.run_config)
    measured_on = held
    if held is not None and share:
        require(isinstance(held, Federation), "federation.held_out needs the node's rows, or a Federation of them.")
        held, measured_on = cast(Federation, held).hold_out(share)
    require(
        held is None or int(asked.max()) < len(held),
        f"the server asks for client {int(asked.max())}, but this node has {0 if held is None else len(held)}; "
        "clients_per_node is the same number on the server and in the node's configuration.",
    )
    used = measured_on if request.purpose == EVALUATION else held
    if held is None or used is None or int(used.sizes[asked].sum()) == 0:
        rows, ballots = torch.zeros(request.shape(len(w))), None
    else:
        simulation = _simulation(model, held, optimizer, loss, alone=not request.clients)
        if request.purpose == EVALUATION or (metrics is not None and request.round <= 1):
            # Before rounds are paid for, a configuration that does not fit the model is found.
            simulation = _measuring(simulation, metrics, used)
        rows, ballots = _answered(simulation, _question(message, request, layout, w, optimizer), asked)
    content = RecordDict({ROWS: ArrayRecord({"rows": as_array(rows.numpy())})})
    if ballots is not None:
        content[BALLOTS] = MetricRecord({IMPROVED.name: ballots.tolist()})
    return Message(content, reply_to=message)


def _simulation(
    model: nn.Module, clients: Clients, local: LocalOptimizer, loss: str | Loss | None, *, alone: bool
) -> Simulation:
    """A simulation of the node's clients; several clients are isolated as in a secure run."""
    # Here, because an app's process is new for every message, and one client's training needs less of the library.
    from dpfedexp.algorithms import fedavg
    from dpfedexp.algorithms.round import Full
    from dpfedexp.engine.simulated import Simulation, ballots_of

    if not alone:
        from dpfedexp.engine.prepare import prepare

        return cast(
            Simulation, prepare(model, clients, fedavg(), local=local, rounds=1, loss=loss, isolated=True)[0].cohort
        )
    _, targets = one_row(clients)
    device = next(iter(model.parameters())).device
    task = Task(model, Layout.of(model), resolve(loss, targets), local, clients, device)
    check_task(task)
    streams = fresh_streams()
    trained = replace(task, local=local.at(PRIOR_RATE), has_client_rates=True) if local.automatic else task
    return Simulation(task, Loop(trained, streams), Full(), streams, 1, ballots=ballots_of(task))


def _measuring(simulation: Simulation, metrics: ClientMetrics | None, rows: Clients) -> Simulation:
    """The same clients, prepared to measure the model on these rows."""
    from dpfedexp.engine.prepare import scores_of

    if metrics is None:
        raise InputError("the server asks for an evaluation, and federation.evaluate is empty.")
    task = simulation.task
    scores = scores_of(task, rows, simulation.trainer, simulation.streams, simulation.unit)
    require(
        scores.metrics == metrics,
        f'federation.evaluate is "{metrics}", and the model and its loss are for "{scores.metrics}".',
    )
    return replace(simulation, scores=scores)


def _question(message: Message, request: NodeRequest, layout: Layout, w: Tensor, local: LocalOptimizer) -> Request:
    correction = message.content.array_records.get(CORRECTION)
    pull = None if correction is None else to_flat(correction, layout, torch.float32)
    controls = None if pull is None else torch.zeros(1, len(w))
    memory = {}
    if local.automatic:
        require(
            request.local_rate is not None or request.purpose == RATE,
            "local lr is 'auto', and the server's request names no rate; set lr = \"auto\" in the run's configuration too.",
        )
        memory = {LOCAL_RATE: torch.tensor(request.local_rate or 0.0, dtype=torch.float64)}
        if request.purpose == SCALE:
            anchor = message.content.array_records.get(ANCHOR_MODEL)
            if anchor is None:
                raise InputError("the server asks for a vote on the rate's scale, and sends no anchor.")
            memory[ANCHOR] = to_flat(anchor, layout, torch.float32)
    state = State(max(0, request.round - 1), w, (w,), request.mechanism.clip, {}, pull, controls, memory)
    return Request(request.purpose, request.round, state, request.mechanism, shake=request.shake)


def _answered(simulation: Simulation, question: Request, asked: Tensor) -> tuple[Tensor, Tensor | None]:
    w = question.state.w.to(simulation.task.device)
    rows, ballots = [], []
    for chunk in asked.split(simulation.chunk_size):
        found = simulation.rows(question, w, chunk)
        rows.append(found[: len(chunk)].cpu())
        if simulation.ballots is not None and question.purpose == UPDATE:
            ballots.append(simulation.ballots(question, chunk, found)[:, 0].cpu())
    return torch.cat(rows), torch.cat(ballots) if ballots else None
