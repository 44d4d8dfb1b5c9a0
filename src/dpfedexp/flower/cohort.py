"""Clients behind Flower's messages: choose nodes, send requests with a deadline, check replies and add them up.

`Participants` are the nodes of a run. `FlowerCohort` answers the engine's requests and decides nothing about privacy. In
`TwoPartyCohort` a second aggregator, the helper, is needed for the sums: a reply is a row under a mask that the server can't
remove, and between the charge and the release the server asks the helper for the sum of masks.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from dpfedexp.accounting.events import Sampling
from dpfedexp.algorithms.probe import BINS, CANDIDATE, SCALE, UPDATE
from dpfedexp.core.client_metrics import EVALUATION
from dpfedexp.core.modules import Layout
from dpfedexp.core.noise import Noise, Words
from dpfedexp.core.sums import Sums
from dpfedexp.engine.engine import ANCHOR, Answer, Cohort, OneGroup, Request
from dpfedexp.errors import InputError, RoundFailed, require
from dpfedexp.flower import messages as wire
from dpfedexp.flower.messages import NodeRequest
from dpfedexp.mechanisms import Mechanism, Release
from dpfedexp.mechanisms.aggregation import SEALED_BYTES, MaskedRow, RoundBinding, Seeds, server_release, set_digest
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

_log = logging.getLogger("flwr")


@dataclass
class Participants:
    """The nodes that take part in a run.

    Formal guarantee: a node that joins changes nothing but its own contribution. Under add-remove adjacency every connected node
    may be asked. Otherwise the number of participants is fixed, and a participant stays one.

    Attributes:
        count: the public number of nodes of the run.
        min_reply_fraction: the fraction of the nodes that must be connected for a round to begin.
        open_to_all: whether every connected node takes part, as under add-remove adjacency.
        allowed: the only nodes that may be asked, sorted; None for any connected node.
        nodes: the participants, in the order in which they joined.
    """

    count: int
    min_reply_fraction: float
    timeout: float
    open_to_all: bool = False
    allowed: tuple[int, ...] | None = None
    nodes: tuple[int, ...] = ()
    _begun: bool = False

    def __post_init__(self) -> None:
        names = self.count if self.allowed is None else len(self.allowed)
        require(
            names == self.count,
            f"the list of nodes names {names}, and the run has {self.count} (clients divided by clients_per_node).",
        )

    def nodes_of_round(self, connected: Callable[[], Iterable[int]]) -> list[int]:
        """The nodes that can be asked: all connected nodes if the run is open to all, else the connected participants.

        An absent node counts as a missing reply. Only the first round waits for all nodes.
        """
        enough = max(1, math.ceil(self.min_reply_fraction * self.count))
        wanted, self._begun = enough if self._begun else self.count, True
        here = self._wait(connected, wanted, enough)
        if self.open_to_all:
            return here
        before, self.nodes = self.nodes, tuple(self._participants(here))
        left_out = len(set(connected()) - set(self.nodes))
        if left_out and not before and self.allowed is None:
            _log.warning(
                "%d nodes are connected that do not take part in this run; name those that shall in federation.nodes",
                left_out,
            )
        new = len(set(self.nodes) - set(before))
        if before and new:
            _log.warning("%d nodes that were not in this run before joined it", new)
        return here

    def _participants(self, connected: Sequence[int]) -> Sequence[int]:
        """Who takes part when these nodes are connected: the listed nodes, or all, or those who joined, in that order.

        A participant stays one even while it is disconnected, so that a node that joins later never changes the contribution of
        another. If there are fewer than `count` participants, the connected nodes with the lowest ids join.

        A SuperNode with its own key has the same id after a restart. Without a key it is a new node, and the old one stays missing.
        """
        if self.allowed is not None:
            return self.allowed
        if self.open_to_all:
            return connected
        free = [node for node in connected if node not in self.nodes]
        return (*self.nodes, *free[: max(0, self.count - len(self.nodes))])

    def _wait(self, connected: Callable[[], Iterable[int]], wanted: int, needed: int) -> list[int]:
        """Wait for participants and return their sorted ids: once `wanted` are connected, or at the deadline if `needed` are.

        Under add-remove adjacency neither log nor error says how many nodes are connected.
        """
        deadline = time.monotonic() + self.timeout
        told = False
        while True:
            ids = sorted(connected())
            participants = self._participants(ids)
            nodes = [node for node in ids if node in participants]
            here = "too few" if self.open_to_all else f"{len(nodes)} of {wanted}"
            over = time.monotonic() >= deadline
            if len(nodes) >= (needed if over else wanted):
                return nodes
            if over:
                text = (
                    f"{here} nodes were connected after waiting {self.timeout:g} seconds, and the round needs at least {needed}. "
                    "Start more SuperNodes, or lower min_reply_fraction; then resume."
                )
                if more := len(ids) - len(nodes):
                    text += (
                        f" Connected are also {more} nodes that do not take part in this run: a SuperNode without a key is "
                        "another node after a restart. Begin a new run in a new folder, with nodes that have keys."
                    )
                raise RoundFailed(text)
            if not told:
                _log.info("Waiting up to %g s for nodes: %s are connected", self.timeout, here)
                told = True
            time.sleep(1.0)


def choose(
    nodes: Sequence[int], clients_per_node: int, sampling: Sampling, groups: int = 1, *, equal: bool = True
) -> list[dict[int, list[int]]]:
    """Choose the clients of one round and divide them into disjoint groups, from system entropy; each maps nodes to clients.

    With full participation these are all clients; otherwise each client independently with probability `sampling.rate`.
    With `equal`, groups have the same size up to one client; otherwise a client's group does not depend on other clients.
    A node none of whose clients is in a group is left out.
    """
    entropy, full = secrets.SystemRandom(), sampling.kind == "full"
    everyone = [(node, client) for node in nodes for client in range(clients_per_node)]
    drawn = [one for one in everyone if full or entropy.random() < sampling.rate]
    places = [number % groups if equal else entropy.randrange(groups) for number in range(len(drawn))]
    entropy.shuffle(places)
    found: list[dict[int, list[int]]] = [{} for _ in range(groups)]
    for place, (node, client) in zip(places, drawn, strict=True):
        found[place].setdefault(node, []).append(client)
    return found


def exchange(grid: Grid, messages: Sequence[Message], seconds: float) -> list[Message]:
    """Send messages; return the replies before the deadline. Unreadable ones are skipped: no client can stop the server."""
    if not messages:
        return []
    waiting = {key for key in grid.push_messages(messages) if key}
    replies: list[Message] = []
    deadline = time.monotonic() + seconds
    while waiting and time.monotonic() < deadline:
        got = _pull(grid, waiting)
        replies += got
        waiting -= {reply.metadata.reply_to_message_id for reply in got}
        if waiting:
            time.sleep(0.5)
    return replies


def _pull(grid: Grid, waiting: set[str]) -> list[Message]:
    """The replies that have arrived; pulled one by one if they can't be read together."""
    try:
        return list(grid.pull_messages(list(waiting)))
    except Exception as error:
        if _is_connection(error):
            raise
    readable: list[Message] = []
    for key in list(waiting):
        try:
            readable += grid.pull_messages([key])
        except Exception as error:
            if _is_connection(error):
                raise
            waiting.discard(key)
    return readable


def _is_connection(error: Exception) -> bool:
    return isinstance(error, OSError) or type(error).__module__.startswith(("httpx", "grpc"))


T = TypeVar("T")


@dataclass(frozen=True)
class ReplyCounts:
    """Counts of a round's replies. Flower does not report missing replies, so they are computed from the number sent."""

    asked: int
    valid: int
    refused: int


def reason_of(reply: Message) -> str:
    """The reason in an error reply, if this library wrote it; any other text could hold something about the client's data."""
    reason = (reply.error.reason or "") if reply.has_error() else ""
    if not reason.startswith(wire.REFUSAL):
        return "it is an error"
    return "".join(c for c in reason.removeprefix(wire.REFUSAL) if c.isprintable())[:300]


@dataclass
class FlowerCohort(Cohort):
    """The nodes connected to a SuperLink, as the engine's cohort.

    Attributes:
        layouts: the layout of each candidate's model; of the only model without a tournament.
        clients: the public number of clients.
        min_reply_fraction: the fraction of the asked clients whose answers must be valid, in each group of a tournament.
        timeout: seconds to wait for replies in a round.
        tau_eta_l: τη_l for SCAFFOLD.
        config: configuration for the app's function, sent with every message.
    """

    is_remote = True
    cpu_is_idle = True

    grid: Grid
    layouts: tuple[Layout, ...]
    participants: Participants
    clients: int
    sampling: Sampling
    rounds: int
    min_reply_fraction: float
    timeout: float
    clients_per_node: int = 1
    tau_eta_l: float | None = None
    config: ConfigRecord = field(default_factory=ConfigRecord)
    _taken: OneGroup = field(default_factory=OneGroup)
    _run: str = ""

    def to_checkpoint(self) -> dict[str, Any]:
        """The participants; empty under add-remove adjacency, which hides who takes part."""
        return {"nodes": list(self.participants.nodes)}

    def from_checkpoint(self, facts: Mapping[str, Any]) -> None:
        self.participants.nodes = tuple(int(node) for node in facts.get("nodes", ()))

    def answer(self, request: Request) -> Answer:
        return self.answers([request])[0]

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        return [self._answer(*exchanged) for exchanged in self._exchanged(requests)]

    def _exchanged(self, requests: Sequence[Request]) -> list[tuple[Request, dict[int, NodeRequest], list[Message]]]:
        """Send the requests to their groups of clients at the same time; return each with what was sent and the replies."""
        sent = [self._requests(*one) for one in zip(requests, self._groups(requests), strict=True)]
        messages = [self._messages(*one) for one in zip(requests, sent, strict=True)]
        every = [message for one in messages for message in one]
        replies = exchange(self.grid, every, self.timeout)
        # Flower's id of the run; clients and helper get it from their own SuperNodes.
        self._run = str(every[0].metadata.run_id) if every else ""
        ids = [{message.metadata.message_id for message in one} for one in messages]
        own = [[reply for reply in replies if reply.metadata.reply_to_message_id in one] for one in ids]
        return list(zip(requests, sent, own, strict=True))

    def _answer(self, request: Request, sent: dict[int, NodeRequest], replies: list[Message]) -> Answer:
        mechanism, width = request.mechanism, self._width(request)
        sums = Sums.zero(width, votes=len(mechanism.votes))

        def add(reply: Message, one: NodeRequest) -> None:
            nonlocal sums
            sums = sums.take(wire.read_sums(reply, one, width))

        _, counts = self._read(request, sent, replies, add)
        return Answer(sums, self._shown(mechanism, counts))

    def _read(
        self,
        request: Request,
        sent: Mapping[int, NodeRequest],
        replies: Iterable[Message],
        read: Callable[[Message, NodeRequest], T],
    ) -> tuple[dict[int, T], ReplyCounts]:
        """Apply `read` to the first reply of every node that was asked; return the results by node, and the counts of clients.

        `read` raises `InputError` for a malformed reply. Raises `RoundFailed` if too few are valid.
        """
        found: dict[int, T] = {}
        waiting, refused = dict(sent), 0
        for reply in replies:
            node = reply.metadata.src_node_id
            one = waiting.pop(node, None)
            if one is None:
                continue
            try:
                require(not reply.has_error(), reason_of(reply))
                found[node] = read(reply, one)
            except Exception as error:
                # No error that a client causes may stop the server, and its text may hold anything.
                reason = str(error) if isinstance(error, InputError) else "it can't be read"
                refused += one.size
                if request.mechanism.counts_are_public(self.sampling):
                    _log.warning("A reply of node %d was not counted: %s", node, reason)
        valid = sum(sent[node].size for node in found)
        counts = ReplyCounts(sum(one.size for one in sent.values()), valid, refused)
        self._check_replies(request, counts)
        return found, counts

    def _width(self, request: Request) -> int:
        """The length of a report's vector."""
        return BINS.get(request.purpose) or request.mechanism.width(self.layouts[request.state.candidate].dimension)

    def _shown(self, mechanism: Mechanism, counts: ReplyCounts) -> dict[str, int]:
        missing = counts.asked - counts.valid - counts.refused
        return {**vars(counts), "missing": missing} if mechanism.counts_are_public(self.sampling) else {}

    def _connected(self) -> list[int]:
        return list(self.grid.get_node_ids())

    def _groups(self, requests: Sequence[Request]) -> list[dict[int, list[int]]]:
        """The drawn clients by node, for each request."""
        nodes, each = self.participants.nodes_of_round(self._connected), self.clients_per_node
        public = requests[0].mechanism.counts_are_public(self.sampling)
        groups = choose(nodes, each, self.sampling, len(requests), equal=public)
        first = {node: place * each for place, node in enumerate(nodes)}
        for place, group in enumerate(groups):
            taken = [first[node] + client for node, clients in group.items() for client in clients]
            self._taken.take(requests[0].round, place, taken, len(nodes) * each)
        return groups

    def _requests(self, request: Request, group: Mapping[int, list[int]]) -> dict[int, NodeRequest]:
        """A request with a new nonce for each node of a group."""
        shared = secrets.token_hex(16) if request.mechanism.needs_helper else None
        return {
            node: NodeRequest(
                request.round,
                shared or secrets.token_hex(16),
                request.mechanism,
                self.sampling,
                tuple(clients) if self.clients_per_node > 1 else (),
                self.tau_eta_l if request.purpose == UPDATE else None,
                self.rounds,
                self.clients_per_node,
                request.purpose,
                request.local_rate,
                request.shake,
                request.state.candidate,
            )
            for node, clients in group.items()
        }

    def _messages(self, request: Request, sent: Mapping[int, NodeRequest]) -> list[Message]:
        state, layout, vote = request.state, self.layouts[request.state.candidate], request.purpose == CANDIDATE
        model = wire.to_arrays(state.reported if vote else state.w, layout)
        records: dict[str, Any] = {wire.MODEL: model, "config": self.config}
        for number, rival in state.rivals.items() if vote else ():
            records[f"{wire.MODEL}.{number}"] = wire.to_arrays(rival.reported, self.layouts[number])
        if state.control is not None:
            records[wire.CONTROL] = wire.to_arrays(state.control, layout)
        if request.purpose == SCALE:
            records[wire.ANCHOR_MODEL] = wire.to_arrays(state.memory[ANCHOR], layout)
        contents = {node: RecordDict({**records, wire.REQUEST: one.to_record()}) for node, one in sent.items()}
        group = str(request.round)
        return [Message(one, node, "train", group_id=group, ttl=self.timeout) for node, one in contents.items()]

    def _check_replies(self, request: Request, counts: ReplyCounts) -> None:
        """Raise `RoundFailed` if fewer than `min_reply_fraction` of the answers are valid.

        Dropouts never weaken the guarantee, but with too few replies the update is mostly noise.
        """
        of, needed = self._needed(request, counts.asked)
        if counts.valid >= needed:
            return
        why = f"{counts.valid} of {of} clients answered well, and at least {needed} must (min_reply_fraction)"
        if not request.mechanism.counts_are_public(self.sampling):
            why = f"fewer than {self.min_reply_fraction:.0%} of the clients that were asked answered well"
        local = request.mechanism.is_local
        cost = "It was charged before it was sent." if local else "Nothing was released or charged."
        raise RoundFailed(f"{_named(request)} failed: {why}. {cost} Resume to try it again.")

    def _needed(self, request: Request, asked: int) -> tuple[int, int]:
        """The number of clients in a group, and how many of them must answer validly (`min_reply_fraction`)."""
        place, groups = request.group or (0, 1)
        equal = groups == 1 or request.mechanism.counts_are_public(self.sampling)
        of = len(range(place, self.clients, groups)) if equal and self.sampling.kind == "full" else asked
        return of, math.ceil(self.min_reply_fraction * of)


def _named(request: Request) -> str:
    """The name of a request in error messages."""
    if request.purpose == EVALUATION:
        return f"the evaluation after round {request.round}"
    return f"round {request.round}" if request.purpose == UPDATE else f"the vote on the {request.purpose}"


@dataclass
class MaskedGroup:
    """A request for masked rows, the round that they are bound to (None if no client was drawn), the rows by node, and counts."""

    request: Request
    round: RoundBinding | None
    rows: dict[int, MaskedRow]
    counts: ReplyCounts


@dataclass
class TwoPartyCohort(FlowerCohort):
    """`FlowerCohort` for the mechanisms "two-party" and "two-party-one-sided".

    Formal guarantee: the server holds masked rows, and their sum with the helper's noise; it adds its own noise before anything is
    released. The server finds the helper by asking the connected nodes; each site encrypts its seed for the helper that it trusts.
    A round is charged before the helper is asked, so a round that the helper refuses is charged too.
    """

    noise: Callable[[], Noise] = field(kw_only=True)
    helper: int | None = None
    """The helper's node id, once known."""

    def _connected(self) -> list[int]:
        return [node for node in self.grid.get_node_ids() if node != self.helper]

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        if self.helper is None or self.helper not in self.grid.get_node_ids():
            self.helper = self._find_helper()
        groups = [self._masked(*exchanged) for exchanged in self._exchanged(requests)]
        unmasked: list[Words] = []

        def answer(place: int, group: MaskedGroup) -> Answer:
            mechanism = cast(TwoPartyGaussian, group.request.mechanism)
            shown = self._shown(mechanism, group.counts)

            def release(denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
                if not unmasked:
                    unmasked.extend(self._ask_helper(groups))
                shown.update(self._shown(mechanism, group.counts))
                try:
                    rows = [one.words for one in group.rows.values()]
                    return server_release(mechanism, rows, unmasked[place], denominator, self.noise)
                except InputError as reason:
                    raise RoundFailed(f"{_named(group.request)} failed: {reason} It was charged.") from None

            zero = Sums.zero(self._width(group.request), votes=len(mechanism.votes))
            return Answer(replace(zero, count=len(group.rows)), shown, release=release)

        return [answer(place, group) for place, group in enumerate(groups)]

    def _masked(self, request: Request, sent: dict[int, NodeRequest], replies: list[Message]) -> MaskedGroup:
        columns = self._width(request) + cast(TwoPartyGaussian, request.mechanism).scalars
        rows, counts = self._read(request, sent, replies, partial(read_masked, columns=columns))
        round_ = wire.round_of(next(iter(sent.values())), columns, self._run) if sent else None
        return MaskedGroup(request, round_, rows, counts)

    def _find_helper(self) -> int:
        """Ask all connected nodes, except those on the run's list, whether they are a helper; return the first one's id."""
        deadline, answered = time.monotonic() + self.participants.timeout, set(self.participants.allowed or ())
        while True:
            new = [node for node in sorted(self.grid.get_node_ids()) if node not in answered]
            record = RecordDict({wire.HELPER: ConfigRecord({"asks": "who"})})
            seconds = max(1.0, min(60.0, deadline - time.monotonic()))
            replies = exchange(self.grid, [Message(record, node, "train", ttl=seconds) for node in new], seconds)
            answered |= {reply.metadata.src_node_id for reply in replies}
            found = sorted(r.metadata.src_node_id for r in replies if not r.has_error() and wire.HELPER in r.content)
            if found:
                _log.info("Node %d is the helper", found[0])
                return int(found[0])
            if time.monotonic() >= deadline:
                raise RoundFailed(
                    f"no connected node was a helper within {self.participants.timeout:g} seconds; start the helper's SuperNode "
                    "with DPFEDEXP_HELPER naming its file, then resume."
                )
            time.sleep(1.0)

    def _ask_helper(self, groups: Sequence[MaskedGroup]) -> list[Words]:
        """Ask the helper once for the sums of masks of all groups; rows whose seeds it can't open are dropped from the groups."""
        request = groups[0].request
        if any(group.round is None for group in groups):
            raise RoundFailed(f"{_named(request)} failed: no client was drawn. It was charged.")
        while True:
            asked = [
                (cast(RoundBinding, group.round), [(node, one.sealed) for node, one in sorted(group.rows.items())])
                for group in groups
            ]
            reply = self._exchange(request, asked)
            closed = reply.content.config_records.get(wire.HELPER, ConfigRecord()).get("closed")
            if not isinstance(closed, list):
                return read_answers(reply, asked)
            bad = set(closed) & {node for group in groups for node in group.rows}
            _log.warning("The helper can't open the seeds of some clients; they are left out")
            for group in groups:
                left = {node: one for node, one in group.rows.items() if node not in bad}
                refused = group.counts.refused + len(group.rows) - len(left)
                group.rows, group.counts = left, replace(group.counts, valid=len(left), refused=refused)
            if not bad or any(one.counts.valid < self._needed(one.request, one.counts.asked)[1] for one in groups):
                raise RoundFailed(
                    f"{_named(request)} failed: the helper can't open the seeds of most clients, and too few are left; their "
                    "sites must pin this helper's key. It was charged."
                )

    def _exchange(self, request: Request, groups: Sequence[tuple[RoundBinding, Seeds]]) -> Message:
        content = RecordDict()
        for place, (round_, seeds) in enumerate(groups):
            bound = {name: value for name, value in vars(round_).items() if name != "run"}
            sent: dict[str, Any] = {"nodes": [node for node, _ in seeds], "seeds": [sealed for _, sealed in seeds]}
            content[f"{wire.HELPER}.{place}" if place else wire.HELPER] = ConfigRecord({"asks": "sum", **bound, **sent})
        failed = f"{_named(request)} failed: the helper"
        message = Message(content, cast(int, self.helper), "train", group_id=str(request.round), ttl=self.timeout)
        replies = exchange(self.grid, [message], self.timeout)
        if not replies:
            raise RoundFailed(f"{failed} did not answer. It was charged. Resume to try again.")
        if replies[0].has_error():
            raise RoundFailed(f"{failed} refused: {reason_of(replies[0])} It was charged.")
        return replies[0]


def read_masked(reply: Message, request: NodeRequest, columns: int) -> MaskedRow:
    """The masked row and the sealed seed of a reply. Raises `InputError` with the reason if any part of the reply is malformed."""
    sent, fields = wire.read_parts(reply, request)
    seed = fields.get("seed")
    if not isinstance(seed, bytes) or len(seed) != SEALED_BYTES:
        raise InputError("its seed is not sealed as it must be")
    return MaskedRow(wire.strict_array(sent, "uint64", (columns,)), seed)


def read_answers(reply: Message, asked: Sequence[tuple[RoundBinding, Seeds]]) -> list[Words]:
    """The helper's sums of masks. Raises `RoundFailed` if they are for another round or other sets of clients."""
    try:
        arrays, fields = reply.content.array_records.get(wire.REPORT), reply.content.config_records.get(wire.HELPER)
        if arrays is None or fields is None or set(arrays) != {"vector"}:
            raise InputError("it holds no sum")
        same = fields.get("digests") == [set_digest(*one) for one in asked]
        require(same, "it is for another round or another set of clients")
        ends = np.cumsum([round_.columns for round_, _ in asked])
        return np.split(wire.strict_array(arrays["vector"], "uint64", (int(ends[-1]),)), ends[:-1])
    except InputError as reason:
        raise RoundFailed(
            f"round {asked[0][0].number} failed: the helper's answer can't be used: {reason}. It was charged."
        ) from None
