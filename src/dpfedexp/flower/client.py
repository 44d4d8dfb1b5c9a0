"""The client's side on Flower: only a report of the mechanism leaves a node.

`private_training` is a Flower mod for a train function:

    @app.train(mods=[private_training])
    def train(msg: Message, context: Context) -> Message: ...

The function trains as in any Flower app and returns the trained parameters. The mod computes the update itself, clips it and, in
local privacy, randomizes it, before a reply exists. Where the run asks for votes, the function returns their values as metrics in a
record "dpfedexp.votes"; they leave the node centered and within ±½. All other metrics, losses, numbers of examples and error texts
stay on the node. That a client answers at all, and when, is visible to the server.

A node without a guard file holds a run to the limits that it announced (`AnnouncedLimits`). Limits over all runs, restarts and
simultaneous messages need a guard file.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from torch import Tensor

from dpfedexp.algorithms.probe import CLIP, SCALE, UPDATE, Probe
from dpfedexp.core.client_metrics import EVALUATION
from dpfedexp.core.clipping import clip
from dpfedexp.core.modules import Layout
from dpfedexp.core.noise import Noise
from dpfedexp.core.sums import client_votes
from dpfedexp.errors import InputError, checked, require
from dpfedexp.flower import messages
from dpfedexp.flower.app_settings import configured_run
from dpfedexp.flower.guard import Guard, Refused, node_charge, total
from dpfedexp.flower.helper import Sender, helper_reply, masked_content, pinned_key
from dpfedexp.flower.messages import (
    CORRECTION,
    MODEL,
    NodeRequest,
    deployment_noise,
    layout_of,
    refusal,
    to_arrays,
    to_flat,
    with_secure_noise,
)
from dpfedexp.mechanisms import Mechanism, Report
from dpfedexp.mechanisms.serialization import decode, encode

_log = logging.getLogger("flwr")

ENFORCED = "dpfedexp-enforced"
_OWN_CONTROL = "dpfedexp.own-control"
_ANNOUNCED_LIMITS = "dpfedexp.announced-limits"
_DELTA = 1e-5
"""At which ε is shown; costs are compared by μ, or by the pure ε of a PrivUnit report."""
_ROUNDING = 1 + 1e-6
"""Two machines that calibrate the same noise may differ by rounding."""
_SEARCH = 1 + 1e-4
"""The best split of PrivUnit's ε is searched for, and found to about 1e-6 of it."""


@checked
def clip_and_randomize(
    update: Tensor, mechanism: Mechanism, noise: Noise | None = None, ballots: Tensor | None = None
) -> Report:
    """Clip and randomize an update [d], or one row per client [n, d]; returns the mechanism's report.

    Formal guarantee: that of `mechanism`. Rows that are not finite become zero, rows are clipped to the ball of radius C, then the
    mechanism adds what its setting asks of a client: nothing in central privacy, all of the noise in local privacy. Noise comes
    from the operating system unless a test passes its own. `ballots` has a row per client with the values of the mechanism's votes
    other than "within clip", [n, k']; a share is always within ±½.

    >>> from dpfedexp.mechanisms import CentralGaussian
    >>> clip_and_randomize(torch.tensor([3.0, 4.0]), CentralGaussian(clip=1.0, noise_multiplier=5.0)).vector
    tensor([[0.6000, 0.8000]])
    """
    rows = update[None] if update.dim() == 1 else update
    clipped, given = clip(rows.float(), mechanism.clip), {} if ballots is None else {"ballots": ballots}
    return mechanism.randomize(clipped, torch.arange(len(rows)), noise or deployment_noise(), **given)


def reply_content(update: Tensor, request: NodeRequest, ballots: Tensor | None, sender: Sender) -> RecordDict:
    """The whole content of the reply that carries this update's report; a mask needs to know who sends it."""
    report = clip_and_randomize(update, request.mechanism, ballots=ballots)
    if request.mechanism.needs_helper:
        return masked_content(report, request, sender)
    if request.clients:
        return messages.sums_content(request.mechanism.collect(report), request)
    return messages.report_content(report, request)


def enforced(context: Context) -> bool:
    """Whether the site's own process (`dpfedexp node`) clips, randomizes and charges, so that this one must not do it as well.

    The setting is a random token that `dpfedexp node` draws when it starts; users do not set it.
    """
    return re.fullmatch(r"[0-9a-f]{32}", str(context.node_config.get(ENFORCED))) is not None


def read_request(message: Message) -> tuple[NodeRequest, Layout, Tensor]:
    """The server's request, and the layout and the parameters [d] of the model that it came with."""
    request = NodeRequest.from_message(message)
    model = message.content.array_records.get(MODEL)
    if model is None:
        raise InputError(f"the message carries no model: its arrays must be in the record {MODEL!r}.")
    layout = layout_of(model)
    w = to_flat(model, layout, torch.float32)
    request.mechanism.check_model(request.shape(len(w))[1])
    return request, layout, w


@checked
def private_training(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """The mod. Refuses with an error reply that says why; a failure of the app itself is told to the node's own log only."""
    answered = helper_reply(message, str(context.run_id), context.node_config)
    if answered is not None:
        return answered
    try:
        request, layout, w = read_request(message)
        control = _control(message, request, layout)
        # Last, because a refused request must cost nothing, and an admitted one is charged here.
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
    except (ValueError, ArithmeticError):  # of no data: the app has not been called
        return refusal(message, "the mechanism can't be computed with these numbers.")
    try:
        if control is not None:
            correction = to_arrays(control - _own_control(context, len(w)), layout)
            message.content = RecordDict({**message.content, CORRECTION: correction})
        trained = call_next(message, context)
        update = _update(trained, request, layout, w)
        if control is not None and request.tau_eta_l is not None:
            _remember(context, request.mechanism, control, update.flatten(), request.tau_eta_l)
        if enforced(context):
            return trained
        sender = Sender(str(context.run_id), int(context.node_id), helper_key)
        return Message(reply_content(update, request, read_ballots(trained, request), sender), reply_to=message)
    except Exception as error:
        _log.error("the app's train function failed on this node", exc_info=error)
        return refusal(message, "the app's train function failed; see the node's log.")


def _guard(context: Context) -> Guard | None:
    """The operator's guard. What is wrong with the file is the operator's to know: the server learns no path."""
    try:
        return Guard.of_node(context.node_config)
    except InputError as reason:
        raise Refused(str(reason), shown="this node's guard file can't be used; see the node's log.") from None


def _update(trained: Message, request: NodeRequest, layout: Layout, w: Tensor) -> Tensor:
    """w⁽ᵗ'τ⁾ − w⁽ᵗ⁾ [d], or the rows that `answer` computed, one for each client [n, d]."""
    if trained.has_error():
        raise RuntimeError(trained.error.reason or "the app returned an error")
    records = trained.content.array_records
    if messages.ROWS in records:
        rows, right = records[messages.ROWS]["rows"].numpy(), request.shape(len(w))
        require(rows.shape == right, f"the app returned rows of shape {rows.shape}; they must have {right}.")
        return torch.from_numpy(rows.astype(np.float32))
    require(
        request.purpose == UPDATE,
        f"the run asks for {request.purpose!r}, which this app does not answer; return dpfedexp.flower.answer(…).",
    )
    require(MODEL in records, f"the app's reply has no record {MODEL!r} with the trained parameters.")
    return to_flat(records[MODEL], layout, torch.float32).sub_(w)


def read_ballots(trained: Message, request: NodeRequest) -> Tensor | None:
    """The app's values of the votes, a row per client; NaN, which counts as the middle, for what is missing or odd."""
    asked = client_votes(request.mechanism.votes)
    if not asked:
        return None
    record = trained.content.metric_records.get(messages.BALLOTS) or MetricRecord()
    values = torch.full((request.size, len(asked)), math.nan, dtype=torch.float64)
    for column, vote in zip(values.unbind(1), asked, strict=True):
        given = record.get(vote.name)
        numbers = given if isinstance(given, list) else [] if given is None else [given]
        if len(numbers) == request.size:
            column.copy_(torch.tensor([float(number) for number in numbers], dtype=torch.float64))
    return values


def _control(message: Message, request: NodeRequest, layout: Layout) -> Tensor | None:
    """With SCAFFOLD, the server's control variate c; the app gets the record `correction` = c − c_i, to add to every gradient."""
    if request.tau_eta_l is None:
        return None
    record = message.content.array_records.get(messages.CONTROL)
    if record is None:
        raise InputError(f"the message carries no control variate: SCAFFOLD needs the record {messages.CONTROL!r}.")
    control = to_flat(record, layout, torch.float32)
    finite = bool(control.isfinite().all())
    require(finite, f"the control variate in the record {messages.CONTROL!r} is not finite.")
    return control


def _own_control(context: Context, dimension: int) -> Tensor:
    record = context.state.array_records.get(_OWN_CONTROL)
    own = torch.zeros(0) if record is None else torch.from_numpy(record["c_i"].numpy())
    # Flower hands the state of one run to the next of the same series, whose model may be another one.
    return own if len(own) == dimension else torch.zeros(dimension)


def _remember(context: Context, mechanism: Mechanism, control: Tensor, update: Tensor, tau_eta_l: float) -> None:
    """c_i ← c_i − c − Δ_i/(τη_l) with the client's own clipped update, before randomization; it never leaves the node.

    Flower keeps `context.state` in the node's memory. A node that restarts, or a run that is resumed, starts from c_i = 0, and the
    next c_i is again the mean of its local gradients: losing it costs one round of correction and no privacy.
    One that is not finite is lost too, or every later update would be.
    """
    delta = clip(update[None], mechanism.clip).vectors[0]
    own = _own_control(context, len(delta)) - control - delta / tau_eta_l
    if not bool(own.isfinite().all()):
        own = torch.zeros_like(own)
    context.state[_OWN_CONTROL] = ArrayRecord({"c_i": Array(own.numpy())})


@dataclass(frozen=True)
class AnnouncedLimits:
    """The limits that a run announces: its mechanism, number of rounds and clients per node.

    A run announces them in its configuration (`context.run_config`), which Flower fixes when the run is created, or in its first
    request where that has no sections of this library's. Later requests may not be of another kind of mechanism, cost more, clip at
    a larger radius (unless the clip is adaptive), ask for more clients of a node, or be more than the announced number of
    rounds: a repeated round is charged again. Updates without clip and noise leave the node only if the configuration itself
        announces an algorithm without privacy. Kept in `context.state`, it binds one run; messages that come at once are counted
        once.
    """

    mechanism: Mechanism
    rounds: int
    clients_per_node: int
    probe: Probe | None = None
    evaluation: Mechanism | None = None
    evaluations: int = 0

    @staticmethod
    def of_run(run_config: Mapping[str, Any], dimension: int) -> AnnouncedLimits | None:
        """The limits that the configuration announces; None for a configuration without sections of this library."""
        try:
            made = configured_run(tuple(run_config.items()), dimension)
        except InputError:
            return None
        return AnnouncedLimits(
            made.mechanism, made.rounds, made.clients_per_node, made.probe, made.evaluation, made.evaluations
        )

    @staticmethod
    def of_request(request: NodeRequest) -> AnnouncedLimits:
        if not request.mechanism.is_private:
            raise Refused(
                "mechanism 'none' sends updates as they are, and the run's configuration announces no algorithm without privacy "
                "(algorithm.name 'fedavg' or 'fedexp'); announce one, or list 'none' in this node's guard file."
            )
        return AnnouncedLimits(request.mechanism, request.rounds, request.clients_per_node)

    def answers(self, purpose: str) -> int:
        """How often a node answers a request for this purpose."""
        if purpose == SCALE:
            return 0 if self.probe is None else len(self.probe.scale_rounds)
        return {UPDATE: self.rounds, EVALUATION: self.evaluations}.get(purpose, 1)

    def check(self, request: NodeRequest) -> None:
        """Raises `Refused` if the request asks for more than this."""
        promised = self.mechanism
        if request.purpose == EVALUATION:
            if self.evaluation is None:
                raise Refused("the server asks for an evaluation, which this run did not announce.")
            promised = self.evaluation
        elif request.purpose != UPDATE:
            if self.probe is None or (request.purpose == CLIP and not self.mechanism.adapts_clip):
                raise Refused(f"the vote {request.purpose!r} is not one that this run announced.")
            promised = self.probe.mechanism(request.purpose)
        kind, announced_kind = request.mechanism.kind, promised.kind
        if kind != announced_kind:
            raise Refused(f"mechanism {kind!r} is not the one that this run announced, {announced_kind!r}.")
        if request.size > self.clients_per_node:
            raise Refused(f"the request is for {request.size} clients, and this run announced {self.clients_per_node}.")
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


def admit_announced(request: NodeRequest, context: Context, dimension: int) -> None:
    """Returns when the request is within what its run announced, and counts the answer; raises `Refused` otherwise."""
    # By run: Flower hands the state of one run to the next of the same series.
    name = f"{_ANNOUNCED_LIMITS}.{context.run_id}"
    kept: dict[str, Any] = dict(context.state.config_records.get(name) or {})
    if kept.get("dimension", dimension) != dimension:
        raise Refused(f"the model has {dimension} parameters, and had {kept['dimension']} when this run began.")
    # Flower fixes a run's configuration when the run is created.
    announcement = AnnouncedLimits.of_run(context.run_config, dimension)
    if announcement is None and kept:
        announcement = AnnouncedLimits(
            with_secure_noise(decode(kept["mechanism"])), kept["rounds"], kept["clients_per_node"]
        )
    announcement = announcement or AnnouncedLimits.of_request(request)
    update = request.purpose == UPDATE
    allowed = announcement.answers(request.purpose)
    counter = "answers" if update else request.purpose
    answers = kept.get(counter, 0)
    announcement.check(request)
    if answers >= allowed:
        raise Refused(
            f"this node has answered {answers} times, as often as this run announced rounds; a repeated round is charged again."
            if update
            else f"this node has answered {request.purpose!r} as often as this run announced; a repeated answer is charged again."
        )
    if not kept:
        _log.info(
            "This node has no guard file and joins a run of %d rounds with mechanism %r: epsilon %.4g a round at delta %g",
            announcement.rounds,
            announcement.mechanism.kind,
            total([node_charge(announcement.mechanism, announcement.clients_per_node)], _DELTA),
            _DELTA,
        )
    mechanism = encode(announcement.mechanism)
    rest: dict[str, Any] = {
        "rounds": announcement.rounds,
        "clients_per_node": announcement.clients_per_node,
        "dimension": dimension,
    }
    context.state[name] = ConfigRecord({**kept, "mechanism": mechanism, **rest, counter: answers + 1})
