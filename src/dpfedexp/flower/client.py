"""The node's side on Flower: only a report of the mechanism leaves a node.

`private_training` is a Flower mod for a train function:

    @app.train(mods=[private_training])
    def train(message: Message, context: Context) -> Message:
        return answer(message, context, model, (inputs, targets))

`answer` trains with the simulator's code, for one client or many. A train function without `answer` returns the trained
parameters. The mod computes the update, clips it and, in local DP, randomizes it, before a reply exists. Metrics, losses, numbers
of examples and error texts stay on the node. The server can see whether and when a client answers.

Several clients per node are for studying a large federation on few machines. The server sees the sum over them, so the node's
operator is trusted with their reports. Against everyone else, each of them has the guarantee of a client, so they are trained in
isolation, as in a secure run.

A node without a guard file holds a run to the limits that the run announced (`AnnouncedLimits`). Limits over all runs, restarts
and simultaneous messages need a guard file. With two-party aggregation a client masks its row, and a node whose operator made it
the helper adds the masks (`helper_reply`). The run's name, the node's id and the helper's key never come from a message.
"""

from __future__ import annotations

import logging
import math
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor, nn

from dpfedexp.algorithms.probe import CANDIDATE, CLIP, RATE, SCALE, UPDATE, Extras, Probe, bind, evaluation_count
from dpfedexp.algorithms.round import State
from dpfedexp.core.client_metrics import EVALUATION, ClientMetrics
from dpfedexp.core.clipping import clip
from dpfedexp.core.local_optimizer import LocalOptimizer, Sgd
from dpfedexp.core.local_rate import IMPROVED, PRIOR_RATE
from dpfedexp.core.losses import Loss, resolve
from dpfedexp.core.modules import Layout
from dpfedexp.core.noise import ChaChaNoise, Noise, Streams, to_words
from dpfedexp.core.sums import client_votes
from dpfedexp.data import Federation
from dpfedexp.engine.engine import ANCHOR, LOCAL_RATE, Request
from dpfedexp.engine.tournament import Candidate, plan_comparison
from dpfedexp.errors import InputError, checked, require
from dpfedexp.flower import messages
from dpfedexp.flower.app_settings import model_named, models_by_name, read_candidates, read_settings
from dpfedexp.flower.guard import Guard, HelperFile, Refused, node_charge, total
from dpfedexp.flower.messages import BALLOTS, CONTROL, HELPER, MODEL, REPORT, ROWS, NodeRequest, refusal, to_flat
from dpfedexp.mechanisms import Mechanism, Report
from dpfedexp.mechanisms.aggregation import BadSeeds, RoundBinding, Seeds, check_public, mask_row
from dpfedexp.mechanisms.base import with_secure_noise
from dpfedexp.mechanisms.serialization import decode, encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian
from dpfedexp.trainers.steps import Loop
from dpfedexp.trainers.task import Clients, Task, check_task, one_row

if TYPE_CHECKING:
    from dpfedexp.engine.simulated import Simulation

_log = logging.getLogger("flwr")

ENFORCED = "dpfedexp-enforced"
KEY_VARIABLE, KEY_NODE = "DPFEDEXP_HELPER_KEY", "dpfedexp-helper-key"
_OWN_CONTROL = "dpfedexp.own-control"
_ANNOUNCED_LIMITS = "dpfedexp.announced-limits"
SECTIONS = ("federation", "algorithm", "local", "participation", "candidates")
"""This library's sections of a run's configuration; with any of them, the limits that it announces must be readable."""
_DELTA = 1e-5
"""The δ at which log and error messages show ε. Costs are compared by μ, or by the pure ε of a PrivUnit report."""
_ROUNDING = 1 + 1e-6
"""Tolerance for two machines that calibrate the same noise with different rounding."""
_SEARCH = 1 + 1e-4
"""Tolerance for the numerical search for the best split of PrivUnit's ε, which is accurate to about 1e-6."""


@checked
def clip_and_randomize(
    update: Tensor, mechanism: Mechanism, noise: Noise | None = None, ballots: Tensor | None = None
) -> Report:
    """Clip and randomize an update [d], or one row per client [n, d]; return the mechanism's report.

    Formal guarantee: that of `mechanism`. Rows that are not finite become zero, and rows are clipped to the ball of radius C. Then
    the mechanism adds a client's noise: none in central DP, all of it in local DP. Noise comes from the operating system unless a
    test passes its own. `ballots` has a row per client with the values of the mechanism's votes other than "within clip", [n, k'];
    a share is always within ±½.

    >>> from dpfedexp.mechanisms import CentralGaussian
    >>> clip_and_randomize(torch.tensor([3.0, 4.0]), CentralGaussian(clip=1.0, noise_multiplier=5.0)).vector
    tensor([[0.6000, 0.8000]])
    """
    rows = update[None] if update.dim() == 1 else update
    clipped, given = clip(rows.float(), mechanism.clip), {} if ballots is None else {"ballots": ballots}
    return mechanism.randomize(clipped, torch.arange(len(rows)), noise or ChaChaNoise(), **given)


def pinned_key(request: NodeRequest, guard: Guard | None, node_config: Mapping[str, Any]) -> str:
    """The public key of the helper that this site trusts; "" where the request needs none."""
    if not request.mechanism.needs_helper:
        return ""
    if request.clients:
        raise InputError("two-party aggregation needs one client per node; set clients_per_node to 1.")
    key = guard.helper_key if guard is not None else None
    key = key or os.environ.get(KEY_VARIABLE) or node_config.get(KEY_NODE)
    if not key:
        raise InputError(
            "helper_key is missing in the node's guard file; two-party aggregation needs the public key of a trusted helper."
        )
    return check_public(key)


def reply_content(
    update: Tensor, request: NodeRequest, ballots: Tensor | None, run: str, node: int, helper_key: str
) -> RecordDict:
    """The content of the reply with this update's report; in two-party aggregation the masked row and the mask's sealed seed.

    `run` and `node` are the SuperNode's, and `helper_key` is from the site's settings: none of them comes from a message.
    """
    report = clip_and_randomize(update, request.mechanism, ballots=ballots)
    if request.mechanism.needs_helper:
        row = to_words(cast(TwoPartyGaussian, request.mechanism).units(report)[0])
        sent = mask_row(row, messages.round_of(request, len(row), run), node, helper_key)
        return messages.reply_of(np.ascontiguousarray(sent.words, dtype="<u8"), request, seed=sent.sealed)
    if request.clients:
        return messages.sums_content(request.mechanism.collect(report), request)
    return messages.report_content(report, request)


def enforced(context: Context) -> bool:
    """Whether `dpfedexp node`, which sets a random token in the node's configuration, clips, randomizes and charges instead."""
    return re.fullmatch(r"[0-9a-f]{32}", str(context.node_config.get(ENFORCED))) is not None


def read_request(message: Message) -> tuple[NodeRequest, Layout, Tensor]:
    """The server's request, and the layout and parameters [d] of the model in its message."""
    request = NodeRequest.from_message(message)
    model = message.content.array_records.get(MODEL)
    if model is None:
        raise InputError(f"the message carries no model: its arrays must be in the record {MODEL!r}.")
    layout = messages.layout_of(model)
    w = to_flat(model, layout, torch.float32)
    request.mechanism.check_model(request.shape(len(w))[1])
    return request, layout, w


@checked
def private_training(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The Flower mod. A refusal is an error reply with its reason; a failure of the app goes to the node's own log only."""
    answered = helper_reply(message, str(context.run_id), context.node_config)
    if answered is not None:
        return answered
    try:
        request, layout, w = read_request(message)
        control = _control(message, request, layout)
        # Last, because this charges an admitted request, and a refused one must cost nothing.
        helper_key = ""
        if not enforced(context):
            guard = _guard(context)
            helper_key = pinned_key(request, guard, context.node_config)
            if guard is not None:
                guard.admit(request, run=str(context.run_id))
            else:
                admit_announced(request, context, len(w))
    except Refused as reason:
        if reason.shown != str(reason):
            _log.warning("this node refused a request: %s", reason)
        return refusal(message, reason.shown)
    except InputError as reason:
        return refusal(message, str(reason))
    except (ValueError, ArithmeticError):  # not about data: the app has not been called
        return refusal(message, "the mechanism can't be computed with these numbers.")
    try:
        if control is not None:
            correction = messages.to_arrays(control - _own_control(context, len(w)), layout)
            message.content = RecordDict({**message.content, messages.CORRECTION: correction})
        trained = call_next(message, context)
        update = _update(trained, request, layout, w)
        if control is not None and request.tau_eta_l is not None:
            _remember(context, request.mechanism, control, update.flatten(), request.tau_eta_l)
        if enforced(context):
            return trained
        ballots, sender = read_ballots(trained, request), (str(context.run_id), int(context.node_id))
        return Message(reply_content(update, request, ballots, *sender, helper_key), reply_to=message)
    except Exception as error:
        _log.error("the app's train function failed on this node", exc_info=error)
        return refusal(message, "the app's train function failed; see the node's log.")


def _guard(context: Context) -> Guard | None:
    """The operator's guard; None without one. Errors in the file go to the node's log, so that the server learns no path."""
    try:
        return Guard.of_node(context.node_config)
    except InputError as reason:
        raise Refused(str(reason), shown="this node's guard file can't be used; see the node's log.") from None


def _update(trained: Message, request: NodeRequest, layout: Layout, w: Tensor) -> Tensor:
    """The update w⁽ᵗ'τ⁾ − w⁽ᵗ⁾ [d], or the rows of `answer`, one for each client [n, d]."""
    if trained.has_error():
        raise RuntimeError(trained.error.reason or "the app returned an error")
    records = trained.content.array_records
    if ROWS in records:
        rows, right = records[ROWS]["rows"].numpy(), request.shape(len(w))
        require(rows.shape == right, f"the app returned rows of shape {rows.shape}; they must have {right}.")
        return torch.from_numpy(rows.astype(np.float32))
    require(
        request.purpose == UPDATE,
        f"the run asks for {request.purpose!r}, which this app does not answer; return dpfedexp.flower.answer(…).",
    )
    require(MODEL in records, f"the app's reply has no record {MODEL!r} with the trained parameters.")
    return to_flat(records[MODEL], layout, torch.float32).sub_(w)


def read_ballots(trained: Message | None, request: NodeRequest) -> Tensor | None:
    """The app's values of the votes, one row per client; NaN, which counts as the middle, for missing or malformed values."""
    asked = client_votes(request.mechanism.votes)
    if not asked:
        return None
    record = (trained and trained.content.metric_records.get(BALLOTS)) or MetricRecord()
    values = torch.full((request.size, len(asked)), math.nan, dtype=torch.float64)
    for column, vote in zip(values.unbind(1), asked, strict=True):
        given = record.get(vote.name)
        numbers = given if isinstance(given, list) else [] if given is None else [given]
        if len(numbers) == request.size:
            column.copy_(torch.tensor([float(number) for number in numbers], dtype=torch.float64))
    return values


def _control(message: Message, request: NodeRequest, layout: Layout) -> Tensor | None:
    """The server's control variate c with SCAFFOLD, else None; the app gets `correction` = c − c_i to add to every gradient."""
    if request.tau_eta_l is None:
        return None
    record = message.content.array_records.get(CONTROL)
    if record is None:
        raise InputError(f"the message carries no control variate: SCAFFOLD needs the record {CONTROL!r}.")
    control = to_flat(record, layout, torch.float32)
    finite = bool(control.isfinite().all())
    require(finite, f"the control variate in the record {CONTROL!r} is not finite.")
    return control


def _own_control(context: Context, dimension: int) -> Tensor:
    record = context.state.array_records.get(_OWN_CONTROL)
    own = torch.zeros(0) if record is None else torch.from_numpy(record["c_i"].numpy())
    # Flower passes the state of one run to the next run of the same series, which may have another model.
    return own if len(own) == dimension else torch.zeros(dimension)


def _remember(context: Context, mechanism: Mechanism, control: Tensor, update: Tensor, tau_eta_l: float) -> None:
    """Store c_i ← c_i − c − Δ_i/(τη_l), with the clipped update before randomization; c_i never leaves the node.

    Flower keeps `context.state` in the node's memory. After a restart of the node or of the run, c_i starts from 0, and the next
    c_i is again the mean of the local gradients: that costs one round of correction and no privacy. A c_i that is not finite is
    reset to 0, because it would spoil every later update.
    """
    delta = clip(update[None], mechanism.clip).vectors[0]
    own = _own_control(context, len(delta)) - control - delta / tau_eta_l
    if not bool(own.isfinite().all()):
        own = torch.zeros_like(own)
    context.state[_OWN_CONTROL] = ArrayRecord({"c_i": Array(own.numpy())})


def helper_reply(message: Message, run: str, node_config: Mapping[str, Any]) -> Message | None:
    """The reply to a message for a two-party helper; None for any other message. `run` is from this node's SuperNode."""
    records = message.content.config_records
    if (record := records.get(HELPER)) is None:
        return None
    try:
        file = HelperFile.of_node(node_config)
        if file is None:
            return refusal(message, "this node is no helper.")
        helper = file.helper()
        if record.get("asks") == "who":
            return Message(RecordDict({HELPER: ConfigRecord({"key": helper.key.public})}), reply_to=message)
        answers = helper.answer(*(_asked(records[name], run) for name in sorted(records) if name.startswith(HELPER)))
        sums = np.concatenate([answer.words for answer in answers])
        words = ArrayRecord({"vector": messages.as_array(np.ascontiguousarray(sums, dtype="<u8"))})
        fields = ConfigRecord({"digests": [answer.digest for answer in answers]})
        return Message(RecordDict({REPORT: words, HELPER: fields}), reply_to=message)
    except BadSeeds as reason:
        _log.warning("this helper refused a request: %s", reason)
        return Message(RecordDict({HELPER: ConfigRecord({"closed": reason.nodes})}), reply_to=message)
    except InputError as reason:
        _log.warning("this helper refused a request: %s", reason)
        return refusal(message, getattr(reason, "shown", str(reason)))
    except Exception as error:
        _log.error("this helper failed", exc_info=error)
        return refusal(message, "the helper failed; see its log.")


def _asked(record: ConfigRecord, run: str) -> tuple[RoundBinding, Seeds]:
    """Parse a request to the helper, which may hold anything: the round and its clients' seeds."""
    values: dict[str, Any] = dict(record)
    kinds = {"number": int, "nonce": str, "columns": int, "clip": float, "mechanism": str, "candidate": int}
    for name, kind in {**kinds, "nodes": list, "seeds": list}.items():
        if not isinstance(values.get(name), kind):
            raise InputError(f"the request to the helper has no {name}, or one of another kind.")
    nodes, seeds = values["nodes"], values["seeds"]
    right = len(nodes) == len(seeds) and all(isinstance(seed, bytes) for seed in seeds)
    if not right or not all(isinstance(node, int) and 0 <= node < 2**64 for node in nodes):
        raise InputError("the request to the helper must name a client for every seed.")
    return RoundBinding(run, *(values[name] for name in kinds)), list(zip(nodes, seeds, strict=True))


def fresh_streams() -> Streams:
    """Unpredictable random streams for one message."""
    return Streams(secrets.randbits(62))


@checked
def answer(
    message: Message,
    context: Context,
    model: nn.Module | dict[str, nn.Module],
    clients: Clients | tuple[Tensor, Tensor],
    *,
    local: LocalOptimizer | None = None,
    loss: str | Loss | None = None,
) -> Message:
    """Compute the whole reply to a server's message: an update, a vote, or an evaluation of the model.

    Return this reply from the app's train function. `private_training` clips it, adds the mechanism's noise, and sends it. With an
    automatic rate, a client whose loss rose in its local steps sends a zero update.

    Args:
        message: the server's message.
        context: Flower's context, with the run's configuration.
        model: a module with the server's layout, on the device to train on; its parameters are replaced by the server's. Or
            several by name, for the candidates of the run's configuration.
        clients: the client's (inputs, targets), or a `Federation` for a node with several clients.
        local: the local optimizer; by default that of the run's configuration.
        loss: a name, or a function (outputs, targets) → one loss per example; by default the usual loss for the targets.
    """
    request = NodeRequest.from_message(message)
    usual = read_settings(context.run_config)[1].build_local() if local is None else local
    candidates = read_candidates(context.run_config) or (Candidate(),)
    require(request.candidate < len(candidates), f"the run's configuration has no candidate {request.candidate}.")
    trained: list[tuple[nn.Module, Any]] = [(model_named(model, one), one.local or usual) for one in candidates]
    net, optimizer = trained[request.candidate]
    asked, layout = torch.tensor(request.clients or (0,)), Layout.of(net)
    w = to_flat(message.content.array_records[MODEL], layout, torch.float32)
    layout.write(net, w)
    held = _node_clients(clients)
    measured = str(context.run_config.get("federation.evaluate", ""))
    metrics = ClientMetrics.parse(measured) if measured else None
    share = float(context.run_config.get("federation.held_out", 0.0))
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
        question = _engine_request(message, request, [Layout.of(one) for one, _ in trained], w, optimizer)
        own = {n: _simulation(*trained[n], held, loss, alone=not request.clients) for n in question.state.players}
        simulation = own[request.candidate]
        if request.purpose == CANDIDATE:
            simulation = replace(simulation, candidates=tuple(own.get(n, simulation) for n in range(len(trained))))
        if request.purpose == EVALUATION or (metrics is not None and request.round <= 1):
            # Checked in the first round too, so that a wrong configuration fails before rounds are charged.
            simulation = _with_metrics(simulation, metrics, used)
        rows, ballots = _rows_and_ballots(simulation, question, asked)
    content = RecordDict({ROWS: ArrayRecord({"rows": messages.as_array(rows.numpy())})})
    if ballots is not None:
        content[BALLOTS] = MetricRecord({IMPROVED.name: ballots.tolist()})
    return Message(content, reply_to=message)


def try_training(
    model: nn.Module | dict[str, nn.Module], clients: Clients | tuple[Tensor, Tensor], loss: str | Loss | None
) -> None:
    """Raise an error if a model can't be trained on a node's data; nothing leaves this function."""
    held = _node_clients(clients)
    for one in models_by_name(model).values():
        if held is not None:
            _simulation(one, Sgd(lr=0.1, steps=1), held, loss, alone=isinstance(clients, tuple))


def _node_clients(clients: Clients | tuple[Tensor, Tensor]) -> Clients | None:
    """The clients of a node as a federation; None for a node without rows."""
    if not isinstance(clients, tuple):
        return clients
    return Federation.from_clients([clients]) if len(clients[1]) else None


def _simulation(
    model: nn.Module, local: LocalOptimizer, clients: Clients, loss: str | Loss | None, *, alone: bool
) -> Simulation:
    """A simulation of the node's clients; several clients are isolated as in a secure run."""
    # Imported here, because every message starts a new process, and one client's training needs less of the library.
    from dpfedexp.algorithms import fedavg
    from dpfedexp.algorithms.round import Full
    from dpfedexp.engine.simulated import Simulation

    if not alone:
        from dpfedexp.engine.prepare import prepare

        engine, _ = prepare(model, clients, fedavg(), local=local, rounds=1, loss=loss, isolated=True)
        return cast(Simulation, engine.cohort)
    _, targets = one_row(clients)
    device = next(iter(model.parameters())).device
    task = Task(model, Layout.of(model), resolve(loss, targets), local, clients, device)
    check_task(task)
    streams = fresh_streams()
    trained = replace(task, local=local.at(PRIOR_RATE), has_client_rates=True) if local.automatic else task
    return Simulation(task, Loop(trained, streams), Full(), streams, 1)


def _with_metrics(simulation: Simulation, metrics: ClientMetrics | None, rows: Clients) -> Simulation:
    """The simulation with the metrics for an evaluation on these rows."""
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


def _engine_request(
    message: Message, request: NodeRequest, layouts: Sequence[Layout], w: Tensor, local: LocalOptimizer
) -> Request:
    """The engine's request, rebuilt from the server's message for the simulation of the node's clients."""
    arrays, layout, candidate = message.content.array_records, layouts[request.candidate], request.candidate
    correction = arrays.get(messages.CORRECTION)
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
            anchor = arrays.get(messages.ANCHOR_MODEL)
            if anchor is None:
                raise InputError("the server asks for a vote on the rate's scale, and sends no anchor.")
            memory[ANCHOR] = to_flat(anchor, layout, torch.float32)
    state = State(request.round, w, (w,), request.mechanism.clip, {}, pull, controls, memory, candidate)
    names = {n: f"{MODEL}.{n}" for n in range(len(layouts)) if request.purpose == CANDIDATE and n != candidate}
    others = {n: to_flat(arrays[name], layouts[n], torch.float32) for n, name in names.items() if name in arrays}
    state = replace(state, rivals={n: replace(state, w=v, recent=(v,), candidate=n) for n, v in others.items()})
    return Request(request.purpose, request.round, state, request.mechanism, shake=request.shake)


def _rows_and_ballots(simulation: Simulation, question: Request, asked: Tensor) -> tuple[Tensor, Tensor | None]:
    """The rows of the clients `asked`, one each, and their values of the vote "improved" (None if it is not asked)."""
    w = question.state.w.to(simulation.task.device)
    rows, ballots, chunks = [], [], list(simulation.chunks(asked))
    for chunk in chunks:
        found = simulation.rows(question, w, chunk)
        rows.append(found[: len(chunk)].cpu())
        improved = simulation.improved(chunk, found) if question.purpose == UPDATE else None
        ballots += [] if improved is None else [improved[: len(chunk), 0].cpu()]
    # Chunks have clients of about the same size; the answer has the order of the request.
    order = torch.cat(chunks).argsort()[asked.argsort().argsort()]
    return torch.cat(rows)[order], torch.cat(ballots)[order] if ballots else None


@dataclass(frozen=True)
class AnnouncedLimits:
    """The limits that a run announces: its mechanisms, numbers of rounds, votes and evaluations, and clients per node.

    A run announces them in its configuration (`context.run_config`), which Flower fixes when the run is created, or in its first
    request if the configuration has no sections of this library. Later requests must not have another kind of mechanism, a higher
    cost, a larger clip (unless the clip is adaptive) or more clients of a node. A client answers at most as many requests as were
    announced, because a repeated round is charged again. Updates without clip and noise leave a node only if the configuration
    announces an algorithm without privacy. The limits are in `context.state`, for one run; simultaneous messages may count as one.
    """

    mechanism: Mechanism
    rounds: int
    clients_per_node: int
    others: Mapping[str, tuple[Mechanism, int]] = field(default_factory=dict)
    """The mechanism of votes and evaluations, and how often a client answers them, by purpose."""
    candidates: int = 1

    @staticmethod
    def of_run(run_config: Mapping[str, Any], dimension: int, candidate: int = 0) -> AnnouncedLimits | None:
        """The limits in a run's configuration for a candidate; None for a configuration without sections of this library."""
        return _announced(tuple(run_config.items()), dimension, candidate)

    @staticmethod
    def of_request(request: NodeRequest) -> AnnouncedLimits:
        if not request.mechanism.is_private:
            raise Refused(
                "mechanism 'none' sends updates as they are, and the run's configuration announces no algorithm without privacy "
                "(algorithm.name 'fedavg' or 'fedexp'); announce one, or list 'none' in this node's guard file."
            )
        return AnnouncedLimits(request.mechanism, request.rounds, request.clients_per_node)

    def check(self, request: NodeRequest) -> int:
        """Return how often a client answers requests for this purpose; raise `Refused` if the request exceeds these limits."""
        promised, often = {UPDATE: (self.mechanism, self.rounds), **self.others}.get(request.purpose, (None, 0))
        if promised is None:
            raise Refused(f"the server asks for {request.purpose!r}, which this run did not announce.")
        if request.candidate >= self.candidates:
            raise Refused(f"candidate {request.candidate} is not one of the {self.candidates} that this run announced.")
        kind, announced_kind = request.mechanism.kind, promised.kind
        if kind != announced_kind:
            raise Refused(f"mechanism {kind!r} is not the one that this run announced, {announced_kind!r}.")
        if (clients := max(request.clients, default=0) + 1) > self.clients_per_node:
            raise Refused(f"the request is for {clients} clients, and this run announced {self.clients_per_node}.")
        event, announced = request.mechanism.client_event(), promised.client_event()
        if not event.strength <= announced.strength * _ROUNDING:
            cost, limit = (total([(e, 1)], _DELTA) for e in (event, announced))
            raise Refused(
                f"the round costs epsilon {cost:.4g} at delta {_DELTA:g}, above the {limit:.4g} that this run announced."
            )
        if not event.tells_no_more_than(announced, _SEARCH):
            raise Refused(
                "the parts of the report's epsilon are not those that this run announced, and compose to more."
            )
        clip, most = request.mechanism.clip, promised.clip
        if not (promised.adapts_clip or clip <= most * _ROUNDING):
            raise Refused(f"clip {clip:g} is above the {most:g} that this run announced.")
        return often


@lru_cache(maxsize=16)
def _announced(run_config: tuple[tuple[str, Any], ...], dimension: int, candidate: int) -> AnnouncedLimits | None:
    """The limits of a configuration, cached: calibration takes seconds, and Flower's simulation has many nodes per process."""
    if not any(name.partition(".")[0] in SECTIONS for name, _ in run_config):
        return None
    try:
        federation, settings = read_settings(dict(run_config))
        algorithm, participation = settings.build_algorithm(), settings.build_participation()
        local, candidates, rounds = settings.build_local(), read_candidates(dict(run_config)), federation.rounds
        players = candidates or (Candidate(),)
        many = evaluation_count(rounds, federation.evaluate_every) if federation.evaluate else 0
        extras = plan_comparison(candidates, local, rounds)[2] if candidates else Extras()
        extras = replace(extras, evaluations=many)

        def bound(one: Candidate) -> tuple[Mechanism, Probe | None, dict[str, Mechanism]]:
            rule, own = one.algorithm or algorithm, one.local or local
            return bind(rule, own, dimension, federation.clients, participation, rounds, rule.private, extras=extras)

        mechanism, probe, others = bound(players[candidate] if candidate < len(players) else Candidate())
        if candidates:
            first = bound(players[0])[0]
            require(mechanism.client_event() == first.client_event(), "candidates cost different epsilons")
    except InputError as reason:
        raise Refused(f"the run's configuration announces no limits that this node can check: {reason}") from None
    often = {EVALUATION: many, CANDIDATE: extras.candidate_votes}
    if probe is not None:
        scales = len(probe.scale_rounds) if extras.scale_votes is None else extras.scale_votes
        often |= {RATE: extras.rate_votes, CLIP: extras.rate_votes * mechanism.adapts_clip, SCALE: scales}
        others |= {purpose: probe.mechanisms[purpose] for purpose in (RATE, CLIP, SCALE) if often[purpose]}
    asked = {purpose: (one, often[purpose]) for purpose, one in others.items()}
    return AnnouncedLimits(mechanism, rounds, federation.clients_per_node, asked, len(players))


def admit_announced(request: NodeRequest, context: Context, dimension: int) -> None:
    """Count an answer if the request is within the limits that its run announced; raise `Refused` otherwise."""
    # Keyed by run: Flower passes the state of one run to the next run of the same series.
    name = f"{_ANNOUNCED_LIMITS}.{context.run_id}"
    kept: dict[str, Any] = dict(context.state.config_records.get(name) or {})
    sized = f"dimension {request.candidate}"
    if kept.get(sized, dimension) != dimension:
        raise Refused(f"the model has {dimension} parameters, and had {kept[sized]} when this run began.")
    # Flower fixes a run's configuration when the run is created.
    announcement = AnnouncedLimits.of_run(context.run_config, dimension, request.candidate)
    if announcement is None and kept:
        mechanism = with_secure_noise(decode(kept["mechanism"]))
        announcement = AnnouncedLimits(mechanism, kept["rounds"], kept["clients_per_node"])
    announcement = announcement or AnnouncedLimits.of_request(request)
    update = request.purpose == UPDATE
    counter, allowed = "answers" if update else request.purpose, announcement.check(request)
    answers, asked = list(kept.get(counter, [0] * announcement.clients_per_node)), request.clients or (0,)
    if (most := max(answers[client] for client in asked)) >= allowed:
        raise Refused(
            f"this node has answered {most} times, as often as this run announced rounds; a repeated round is charged again."
            if update
            else f"this node has answered {request.purpose!r} as often as this run announced; a repeated answer is charged again."
        )
    for client in asked:
        answers[client] += 1
    if not kept:
        _log.info(
            "This node has no guard file and joins a run of %d rounds with mechanism %r: epsilon %.4g a round at delta %g",
            announcement.rounds,
            announcement.mechanism.kind,
            total([node_charge(announcement.mechanism, announcement.clients_per_node)], _DELTA),
            _DELTA,
        )
    kept.setdefault("mechanism", encode(announcement.mechanism))
    kept |= {"rounds": announcement.rounds, "clients_per_node": announcement.clients_per_node}
    context.state[name] = ConfigRecord({**kept, sized: dimension, counter: answers})
