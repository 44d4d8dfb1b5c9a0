"""`DpFedExp`, the server's side as a Flower strategy.

It runs the same mechanism, sums, step sizes and ledger as the simulator; what is added here is what a network asks for: who is
connected, which replies to believe, when to give up, and how to go on after a crash.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from dpfedexp.accounting import Budget, Event, Ledger, PrivacyStatement, guarantee
from dpfedexp.algorithms import Algorithm
from dpfedexp.algorithms.algorithm import settled
from dpfedexp.algorithms.participation import Full, Poisson
from dpfedexp.algorithms.round import State, advance
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.layout import Layout
from dpfedexp.core.local import LocalOptimiser
from dpfedexp.core.noise import Noise
from dpfedexp.core.step_size import initial_memory
from dpfedexp.core.sums import Sums
from dpfedexp.core.votes import Ask
from dpfedexp.engine.advice import Commentary
from dpfedexp.engine.outlets import OUTLETS, recorded
from dpfedexp.engine.plan import Plan, log
from dpfedexp.errors import BudgetExceeded, InputError, LedgerError, RoundFailed, checked, require
from dpfedexp.files import finite, undate
from dpfedexp.flower.access import read_nodes
from dpfedexp.flower.messages import (
    CONTROL,
    MODEL,
    REFUSAL,
    REQUEST,
    Request,
    begun,
    bind,
    check_rate,
    deployment_noise,
    layout_of,
    read_sums,
    to_arrays,
    to_flat,
)
from dpfedexp.flower.monitor import Status, write_status
from dpfedexp.flower.nodes import Places, choose, exchange
from dpfedexp.flower.store import Checkpoint, Saving, open_folder, write_results
from dpfedexp.mechanisms import Mechanism, Release, mechanism_class
from dpfedexp.mechanisms.text import encode

_log = logging.getLogger("flwr")

T = TypeVar("T")
Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]
SEE_LOG = "the server's own log says why."
TRUSTED_NODES = "the clients that share a node, against whoever runs that node: it adds their reports before it answers"
WHETHER_IT_FAILED = "that a round did or did not fail because too few of the clients that were drawn for it answered"
PLACES = "a run has a fixed number of places and shows how many clients answer, so a client that leaves changes more than its part"
WHO_ANSWERS = "whether and when a client answers, which the server and the network can see"


@dataclass(frozen=True)
class Counts:
    """Clients of one round, counted against the messages that were sent: Flower itself reports a hung client as no failure."""

    asked: int
    valid: int
    refused: int

    def shown(self) -> dict[str, int]:
        return {**vars(self), "missing": self.asked - self.valid - self.refused}


def read_replies(
    replies: Iterable[Message], sent: Mapping[int, Request], read: Callable[[Message, Request], T], *, name_nodes: bool
) -> tuple[dict[int, T], int]:
    """What `read` makes of the first reply of every node that was asked, by node, and how many clients' were refused.

    `read` raises `InputError` for a reply that is not as it must be. `name_nodes` says whether the log may name nodes.
    """
    found: dict[int, T] = {}
    waiting, refused = dict(sent), 0
    for reply in replies:
        node = reply.metadata.src_node_id
        request = waiting.pop(node, None)
        if request is None:
            continue
        try:
            require(not reply.has_error(), reason_of(reply))
            found[node] = read(reply, request)
        except InputError as reason:
            refused += request.size
            if name_nodes:
                _log.warning("A reply of node %d was not counted: %s", node, reason)
    return found, refused


def reason_of(reply: Message) -> str:
    """Only this library's own refusals are shown: any other text could hold something about the client's data."""
    reason = (reply.error.reason or "") if reply.has_error() else ""
    if not reason.startswith(REFUSAL):
        return "it is an error"
    return "".join(c for c in reason.removeprefix(REFUSAL) if c.isprintable())[:300]


@checked
class DpFedExp(Strategy):
    """A differentially private federation with a guarantee that holds whatever the clients send or fail to send.

    Args:
        clients: how many there are, a public number fixed in advance: sums are divided by it (by rate·clients with
            `Poisson`). Under replace-one adjacency and in local privacy there are so many places, and the nodes of the
            first round keep theirs; under add-remove adjacency every connected node takes part, however many there are.
        rounds: how many rounds the noise is meant for.
        folder: where ledger, checkpoint, model and statement go; `resume` continues from what is there.
        rebind: when a run is resumed, give the places of nodes that are not connected to nodes that are: for SuperNodes
            without keys, which are other nodes after a restart.
        participation: `Full()` or `Poisson(rate)`, drawn over the connected nodes from system entropy.
        clients_per_node: more than 1 for nodes that simulate many clients each.
        floor: the fraction of the clients asked that must answer well, else the round fails and nothing is released.
        budget: stop before the round that would take ε above this.
        node_timeout: seconds to wait for nodes before a round.
        local: the clients' optimiser, which only DP-SCAFFOLD's control variates ask for.
        noise: makes one fresh source of noise per purpose; a deployment's is the operating system's.
        votes: numbers that every client's app answers in its metrics record "dpfedexp.votes"; their noisy means are in the history.
        nodes: a file with the public keys of the nodes that take part, one to a line (`access.py`): no other node is ever
            asked, and the run is resumed with the same list only.

    Formal guarantee: in central privacy, noise of a fixed size goes onto the sum of replies that the server has clipped itself, and
    the denominator is public, so a reply that is missing, late, repeated or malformed changes nothing in the guarantee: it counts
    as zero. A central round is charged, on disk, after the replies are in and before anything is released; a local round before it
    is sent, because the reports themselves are the release.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        *,
        clients: int,
        rounds: int,
        folder: Path | str,
        resume: bool = False,
        rebind: bool = False,
        participation: Full | Poisson | None = None,
        clients_per_node: int = 1,
        floor: float = 0.8,
        budget: float | None = None,
        node_timeout: float = 300.0,
        local: LocalOptimiser | None = None,
        noise: Callable[[], Noise] = deployment_noise,
        votes: tuple[Ask, ...] = (),
        nodes: Path | str | None = None,
    ) -> None:
        for name, count in (("clients", clients), ("rounds", rounds), ("clients_per_node", clients_per_node)):
            require(isinstance(count, int) and count >= 1, f"{name} is {count!r}; it must be a positive whole number.")
        require(
            clients % clients_per_node == 0,
            f"clients is {clients} and clients_per_node is {clients_per_node}; the first must be a multiple of the second.",
        )
        require(0 < floor <= 1, f"floor is {floor}; it must be above 0 and at most 1.")
        require(node_timeout > 0, f"node_timeout is {node_timeout}; it must be positive.")
        self.participation = participation or Full()
        if not isinstance(self.participation, Full | Poisson):
            raise InputError("participation must be Full() or Poisson(rate); a deployment has no other sampling.")
        require(
            self.has_helper or not mechanism_class(algorithm.mechanism).needs_helper,
            f"mechanism is {algorithm.mechanism!r}, whose sums a helper makes too; use TwoPartyFedExp in place of DpFedExp.",
        )
        self.algorithm, self.clients, self.rounds = algorithm, clients, rounds
        self.folder, self.resume = Path(folder).expanduser().absolute(), resume
        self.clients_per_node, self.floor = clients_per_node, floor
        open_to_all = algorithm.adjacency == "add-remove"
        self.places = Places(clients // clients_per_node, floor, node_timeout, open_to_all, rebind)
        if nodes:
            self.places.allow(read_nodes(nodes))
        self.budget = None if budget is None else Budget(budget, algorithm.delta)
        self.noise, self.votes = noise, votes
        if local is not None:
            check_rate(local)
        self.tau_eta_l: float | None = None
        if algorithm.scaffold:
            require(algorithm.scaffold == "update", "control is 'report', which is for simulations; use 'update'.")
            require(clients_per_node == 1, "dp_scaffold keeps a control variate per client: use one client per node.")
            if local is None or local.steps is None:
                raise InputError(
                    "dp_scaffold needs the clients' local steps: pass local=Sgd(lr=…, steps=…) to DpFedExp."
                )
            self.tau_eta_l = local.tau_eta_l(local.steps)
        self.stopped: str | None = None
        self.history: list[dict[str, Any]] = []
        self._sent: dict[int, Request] = {}

    has_helper: ClassVar[bool] = False  # whether a second aggregator makes the sums too

    # What a run is bound to, set by `begin`.
    layout: Layout
    mechanism: Mechanism
    ledger: Ledger
    run: str
    state: State
    commentary: Commentary

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """Bind the algorithm to the model, and open or create the folder."""
        self.layout = layout_of(initial_arrays)
        w = to_flat(initial_arrays, self.layout)
        require(
            bool(w.isfinite().all()), "the model's initial parameters contain NaN or infinity; they must be finite."
        )
        self.sampling = self.participation.sampling(self.clients)
        self.mechanism = bind(self.algorithm, self.participation, len(w), self.clients, self.rounds, self.votes)
        self.algorithm = settled(self.algorithm, self.mechanism, len(w), self.participation.expected(self.clients))
        control = w.new_zeros(len(w)) if self.algorithm.scaffold else None
        memory = initial_memory(self.algorithm.rule, w)
        self.state = State(0, w, (w,), self.mechanism.clip, self.algorithm.server.init(w), control, memory=memory)
        self.config = {
            "algorithm": self.algorithm.name,
            "mechanism": encode(self.mechanism),
            "clients": self.clients,
            "clients_per_node": self.clients_per_node,
            "sampling": self.sampling.kind,
            "rate": self.sampling.rate,
            "delta": self.algorithm.delta,
            "parameters": [[name, *shape] for name, shape in zip(self.layout.names, self.layout.shapes, strict=True)],
            "step": self.algorithm.step,
            "quantile": self.algorithm.clip.quantile if isinstance(self.algorithm.clip, AdaptiveClip) else None,
            "nodes": None if self.places.allowed is None else list(self.places.allowed),
        }
        header = {"algorithm": self.algorithm.name, "clients": self.clients, "delta": self.algorithm.delta}
        if self._no_other_adjacency:
            header["no_other_adjacency"] = self._no_other_adjacency
        self.ledger, self.run, last = open_folder(self.folder, self.config, header, resume=self.resume)
        self._saving, self._began = Saving(self.folder), time.time()
        if last is not None:
            self.state, self.history, self.places.taken = last.state, last.history, last.nodes
            _log.info("Resuming after round %d of %d", self.state.round, self.rounds)
        plan = Plan.of(self.algorithm, self.participation, self.clients, len(w), self.rounds, mechanism=self.mechanism)
        self.commentary = Commentary(plan, w, partial(log, _log))

    @property
    def reported(self) -> ArrayRecord:
        """The model so far: the average of the last two iterates for FedEXP, the last one otherwise."""
        return to_arrays(self.state.reported, self.layout)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, ttl: float | None = None
    ) -> list[Message]:
        """The round's messages: the model of the strategy's own state, and a request with a nonce of its own for each node."""
        mechanism = self.mechanism.at_radius(self.state.radius)
        event = mechanism.event(self.sampling)
        self.ledger.check_newest()
        if self.budget is not None:
            self.ledger.check(self.budget, event)
        asked = choose(self.places.nodes_of_round(grid), self.clients_per_node, self.sampling)
        shared = secrets.token_hex(16) if mechanism.needs_helper else None
        self._sent = {
            node: Request(
                server_round,
                shared or secrets.token_hex(16),
                mechanism,
                self.sampling,
                clients if self.clients_per_node > 1 else (),
                self.tau_eta_l,
                self.rounds,
                self.clients_per_node,
            )
            for node, clients in asked.items()
        }
        records: dict[str, Any] = {MODEL: to_arrays(self.state.w, self.layout), "config": config}
        if self.state.control is not None:
            records[CONTROL] = to_arrays(self.state.control, self.layout)
        if mechanism.is_local:
            self._charge(server_round, event)
        self._central = begun(self.noise, mechanism, mechanism.width(self.layout.dimension))
        contents = {n: RecordDict({**records, REQUEST: request.to_record()}) for n, request in self._sent.items()}
        return [Message(c, node, "train", group_id=str(server_round), ttl=ttl) for node, c in contents.items()]

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Add what is valid, charge, release, move the model; the files are on disk before the next charge, and at `finish`."""
        mechanism = self.mechanism.at_radius(self.state.radius)
        event = mechanism.event(self.sampling)
        public = mechanism.counts_are_public(self.sampling)
        width, votes = mechanism.width(self.layout.dimension), len(mechanism.votes)
        sums, counts = self._added(replies, width, public, votes)
        self._check_floor(server_round, counts, mechanism)
        if not mechanism.is_local:
            self._charge(server_round, event)
        release, counts = self._released(server_round, mechanism, sums, counts)
        share = self.participation.expected(self.clients) / self.clients
        state, eta_g = advance(self.algorithm, release, self.state, share=share, tau_eta_l=self.tau_eta_l)
        shown: dict[str, Any] = {
            "round": server_round,
            "eta_g": eta_g,
            "clip": release.clip,
            "update_norm": release.norm,
            "epsilon_round": guarantee(event, 1, self.algorithm.delta).epsilon_round,
            "epsilon_total": self.ledger.guarantee(self.algorithm.delta).epsilon,
            "delta": self.algorithm.delta,
            **{vote.field: release.votes[vote.name] for vote in mechanism.votes},
        }
        if public:
            shown |= counts.shown()
        shown = recorded("deployed round", shown, secure=True)
        history = [*self.history, finite(shown)]
        checkpoint = Checkpoint(state, self.config, history, self.run, self.ledger.mark(), self.places.taken)
        self._before, self._saving.stored = (self.state, self.history), False
        self.state, self.history = state, history
        self._saving.begin(checkpoint, self._publishing("running"))
        self.commentary.after(shown, state.w)
        return self.reported, _record(shown)

    def _check_floor(self, number: int, counts: Counts, mechanism: Mechanism) -> None:
        """Raises `RoundFailed` where fewer than the floor answered well.

        Dropouts never weaken the guarantee, but a model that is moved by noise alone is of no use.
        """
        of, needed = self._needed(counts.asked)
        if counts.valid >= needed:
            return
        why = f"{counts.valid} of {of} clients answered well, and the floor is {needed}"
        if not mechanism.counts_are_public(self.sampling):
            why = f"fewer than {self.floor:.0%} of the clients that were asked answered well"
        cost = (
            "It was charged: the reports had been sent." if mechanism.is_local else "Nothing was released or charged."
        )
        raise RoundFailed(f"round {number} failed: {why}. {cost} Resume to try it again.")

    def _needed(self, asked: int) -> tuple[int, int]:
        """Of how many clients the floor is a fraction, and how many that is."""
        of = self.clients if self.sampling.kind == "full" else asked
        return of, math.ceil(self.floor * of)

    def _added(self, replies: Iterable[Message], width: int, public: bool, votes: int) -> tuple[Sums, Counts]:
        """The sums over valid replies, with so many votes. `public`: whether the log may say which node was asked."""
        sums = Sums.zero(width, votes=votes)

        def add(reply: Message, request: Request) -> None:
            nonlocal sums
            sums = sums.take(read_sums(reply, request, width))

        _, refused = read_replies(replies, self._sent, add, name_nodes=public)
        return sums, Counts(sum(request.size for request in self._sent.values()), sums.count, refused)

    def _released(self, number: int, mechanism: Mechanism, sums: Sums, counts: Counts) -> tuple[Release, Counts]:
        return mechanism.release(sums, self.participation.expected(self.clients), self._central, self.noise()), counts

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Message]:
        """None: a score on the clients' data would leave them without noise. Evaluate on the server's own data instead."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return None

    def summary(self) -> None:
        who = "all of them" if self.sampling.kind == "full" else f"each with probability {self.sampling.rate:g}"
        name, rounds = self.algorithm.name, self.rounds
        _log.info("%s over %d clients, %s in every round, %d rounds", name, self.clients, who, rounds)
        if self.algorithm.private:
            plan = guarantee(self.mechanism.event(self.sampling), rounds, self.algorithm.delta)
            _log.info("Planned: epsilon %.4f at delta %g (%s)", plan.epsilon_total, plan.delta, plan.accountant)
        else:
            _log.warning("This federation is NOT private: the server sees every update and adds no noise")
        self.commentary.begin(self.history)

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float = 3600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """All rounds that are left.

        `timeout` is how long a round waits for replies; `evaluate_fn` gets the model after every round, for the server's own data.
        """
        require(
            num_rounds in (None, self.rounds),
            f"num_rounds is {num_rounds}, but the strategy was made for {self.rounds} rounds; its noise depends on it.",
        )
        self.begin(initial_arrays)
        self.summary()
        _log.info("Ledger, checkpoint, model, statement and status go to %s", self.folder)
        self._publishing("running")()
        end: Status = "failed"
        why, arrays, result = SEE_LOG, self.reported, Result()
        result.train_metrics_clientapp = {line["round"]: _record(line) for line in self.history}
        try:
            for number in range(self.state.round + 1, self.rounds + 1):
                messages = self.configure_train(number, arrays, train_config or ConfigRecord(), grid, timeout)
                arrays, metrics = self.aggregate_train(number, exchange(grid, messages, timeout))
                result.train_metrics_clientapp[number] = metrics
                _log.info("Round %d of %d: %s", number, self.rounds, dict(metrics))
                scores = evaluate_fn(number, arrays) if evaluate_fn else None
                if scores is not None:
                    result.evaluate_metrics_serverapp[number] = scores
                    _log.info("Round %d of %d, on the server's own data: %s", number, self.rounds, dict(scores))
            self._saving.wait()
            end, why = "completed", ""
        except BudgetExceeded as reason:
            end, why = "stopped", str(reason)
            self.stopped = str(reason)
            _log.warning("Stopped: %s", reason)
        except RoundFailed as reason:
            why = str(reason)
            _log.error("Stopped: %s", reason)
            raise
        finally:
            self._close(end, why)
        result.arrays = self.reported
        return result

    def _close(self, end: Status, why: str) -> None:
        """What the folder says at the end, once nothing is being written any more."""
        failure = self._saving.end()
        if failure is not None:
            end, why = "failed", SEE_LOG
        if not self._saving.stored:
            self.state, self.history = self._before
        self.commentary.end(self.state.w)
        self._publishing(end, why)()
        self.finish()
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """For whoever calls `configure_train` and `aggregate_train` instead of `start`: the end, with all files on disk."""
        self._saving.wait()
        self.ledger.close()
        undate(self.folder, OUTLETS, self._began)

    def _charge(self, server_round: int, event: Event) -> None:
        """From here on the round counts, whatever becomes of it, and the status says so."""
        self._saving.wait()
        try:
            self.ledger.charge(server_round, event, run=self.run)
        except OSError as error:
            raise LedgerError(
                f"round {server_round} can't be charged: {error.strerror}. Nothing of it was released."
            ) from None
        write_status(self.folder, "running", self.state.round, self.rounds, self.statement)

    def _publishing(self, status: Status, reason: str = "") -> Callable[[], None]:
        """Writes the model so far, what was promised so far, and how the run stands now, for whoever reads the folder."""
        state, statement, advice = self.state, self.statement, tuple(self.commentary.advice)

        def publish() -> None:
            write_results(self.folder, self.layout.unflatten(state.reported), statement, advice)
            write_status(self.folder, status, state.round, self.rounds, statement, reason)

        return publish

    @property
    def _no_other_adjacency(self) -> str:
        """Why there is no figure for the other adjacency; empty where there is one."""
        return "" if self.algorithm.adjacency == "add-remove" else PLACES

    @property
    def statement(self) -> PrivacyStatement:
        """What was promised to whom, from what was charged, with what it leaves out."""
        left_out = [WHO_ANSWERS]
        if self.clients_per_node > 1:
            left_out.append(TRUSTED_NODES)
        if not self.mechanism.counts_are_public(self.sampling):
            left_out.append(WHETHER_IT_FAILED)
        # A run may be resumed with another floor. Counts are in the history where they are public, and so in every local run.
        counts: list[int] = [line["valid"] for line in self.history if "valid" in line]
        return PrivacyStatement.from_charges(
            self.ledger.charges(),
            self.algorithm.delta,
            algorithm=self.algorithm.name,
            clients=self.clients,
            simulated=False,
            planned=[(self.mechanism.event(self.sampling), self.rounds)] if self.rounds != self.state.round else None,
            not_covered=left_out,
            reporting=min([math.ceil(self.floor * self.clients), *counts]),
            no_other_adjacency=self._no_other_adjacency,
        )


def _record(shown: dict[str, Any]) -> MetricRecord:
    return MetricRecord({name: math.inf if value is None else value for name, value in shown.items()})
