"""`TwoPartyFedExp`: the server's side where a second aggregator makes the sums too.

A round is `DpFedExp`'s: requests to the clients, replies, the floor, the charge, the release. Only two things differ. A reply is a
row under a mask that the server can't take off. And between the charge and the release the helper is asked for the sum of masks.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from dpfedexp.core.noise.lattice import Words, from_words, to_words
from dpfedexp.core.sums import Sums
from dpfedexp.errors import InputError, RoundFailed, require
from dpfedexp.flower.helper import HELPER, round_of
from dpfedexp.flower.messages import REPORT, Request, read_parts, strict_array
from dpfedexp.flower.nodes import exchange
from dpfedexp.flower.strategy import Counts, DpFedExp, read_replies, reason_of
from dpfedexp.mechanisms import Mechanism, Release
from dpfedexp.mechanisms.aggregation import SEALED_BYTES, Masked, Round, set_digest, unmasked
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

_log = logging.getLogger("flwr")


class TwoPartyFedExp(DpFedExp):
    """`DpFedExp` for algorithms whose mechanism is "two-party" or "two-party-one-sided".

    Formal guarantee: the server holds rows under masks, and their sum with the helper's noise; it adds noise of its own before
    anything leaves. Which node is the helper is found by asking the connected nodes; that a node's seeds are for the helper that
    its site trusts is the site's doing. A round is charged before the helper is asked, so one that the helper refuses is paid for.
    """

    has_helper = True
    helper: int | None = None
    """The helper's node, once it is known."""

    _received: dict[int, Masked]

    def begin(self, initial_arrays: ArrayRecord) -> None:
        """Bind the algorithm to the model, and open or create the folder."""
        require(
            self.clients_per_node == 1, "two-party aggregation needs one client per node; set clients_per_node to 1."
        )
        super().begin(initial_arrays)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid, ttl: float | None = None
    ) -> list[Message]:
        """The round's messages to the clients; the helper is not one of them."""
        self._grid, self._seconds = grid, 600.0 if ttl is None else ttl
        if self.helper is None or self.helper not in grid.get_node_ids():
            self.helper = self._find_helper(grid)
        clients: Any = _Clients(grid, self.helper)
        messages = super().configure_train(server_round, arrays, config, clients, ttl)
        # Flower's id of the run, which clients and helper know from their own nodes.
        self._flower_run = str(messages[0].metadata.run_id) if messages else ""
        return messages

    def _find_helper(self, grid: Grid) -> int:
        """Ask every connected node whether it is a helper, until one says so. A client of the run's list can't be one."""
        deadline, answered = time.monotonic() + self.places.timeout, set(self.places.allowed or ())
        while True:
            new = [node for node in sorted(grid.get_node_ids()) if node not in answered]
            record = RecordDict({HELPER: ConfigRecord({"asks": "who"})})
            seconds = max(1.0, min(60.0, deadline - time.monotonic()))
            replies = exchange(grid, [Message(record, node, "train", ttl=seconds) for node in new], seconds)
            answered |= {reply.metadata.src_node_id for reply in replies}
            found = sorted(r.metadata.src_node_id for r in replies if not r.has_error() and HELPER in r.content)
            if found:
                _log.info("Node %d is the helper", found[0])
                return int(found[0])
            if time.monotonic() >= deadline:
                raise RoundFailed(
                    f"no connected node was a helper within {self.places.timeout:g} seconds; start the helper's SuperNode with "
                    "DPFEDEXP_HELPER naming its file, then resume."
                )
            time.sleep(1.0)

    def _added(self, replies: Iterable[Message], width: int, public: bool, votes: int) -> tuple[Sums, Counts]:
        """The valid rows, which nobody can add to anything readable yet; the sums are empty but for their count."""
        self._received, refused = read_replies(
            replies, self._sent, lambda reply, request: read_masked(reply, request, self._columns), name_nodes=public
        )
        nothing = Sums.zero(width, votes=votes)
        sums = Sums(nothing.vector, nothing.squares, nothing.votes, len(self._received))
        return sums, Counts(len(self._sent), len(self._received), refused)

    @property
    def _columns(self) -> int:
        return _masking(self.mechanism).columns(self.layout.dimension)

    def _released(self, number: int, mechanism: Mechanism, sums: Sums, counts: Counts) -> tuple[Release, Counts]:
        mechanism = _masking(mechanism)
        if not self._sent:
            raise RoundFailed(f"round {number} failed: nobody was asked. It was charged.")
        round_ = round_of(next(iter(self._sent.values())), self._columns, self._flower_run)
        answer = self._ask_helper(number, round_)
        own: Words | None = None
        if "server" in mechanism.sides:
            own = to_words(mechanism.noise_units(round_.columns, "server", self.noise(), self.noise()))
        total, left = unmasked([sent.words for sent in self._received.values()], answer, own), len(self._received)
        self._received = {}
        try:
            release = mechanism.decode(from_words(total), left, self.participation.expected(self.clients))
        except InputError as reason:
            raise RoundFailed(f"round {number} failed: {reason} It was charged.") from None
        return release, Counts(counts.asked, left, counts.refused + counts.valid - left)

    def _ask_helper(self, number: int, round_: Round) -> Words:
        """The helper's answer for the clients whose seeds it can open: fewer than were received where a client sent a bad one."""
        while True:
            seeds = [(node, sent.sealed) for node, sent in sorted(self._received.items())]
            reply = self._exchange(number, round_, seeds)
            closed = reply.content.config_records.get(HELPER, ConfigRecord()).get("closed")
            if not isinstance(closed, list):
                return read_answer(reply, round_, set_digest(round_, seeds))
            bad = set(closed) & set(self._received)
            _log.warning("The helper can't open the seeds of %d clients; they are left out", len(bad))
            self._received = {node: sent for node, sent in self._received.items() if node not in bad}
            if not bad or len(self._received) < self._needed(len(self._sent))[1]:
                raise RoundFailed(
                    f"round {number} failed: the helper can't open the seeds of so many clients that fewer than the floor are "
                    "left; their sites must pin this helper's key. It was charged."
                )

    def _exchange(self, server_round: int, round_: Round, seeds: list[tuple[int, bytes]]) -> Message:
        fields: dict[str, Any] = {
            "asks": "sum",
            "round": round_.number,
            "nonce": round_.nonce,
            "columns": round_.columns,
            "clip": float(round_.clip),
            "mechanism": round_.mechanism,
            "nodes": [node for node, _ in seeds],
            "seeds": [sealed for _, sealed in seeds],
        }
        failed = f"round {server_round} failed: the helper"
        if self.helper is None:
            raise RoundFailed(f"{failed} is not known. It was charged.")
        content = RecordDict({HELPER: ConfigRecord(fields)})
        message = Message(content, self.helper, "train", group_id=str(server_round), ttl=self._seconds)
        replies = exchange(self._grid, [message], self._seconds)
        if not replies:
            raise RoundFailed(f"{failed} did not answer. It was charged. Resume to try again.")
        if replies[0].has_error():
            raise RoundFailed(f"{failed} refused: {reason_of(replies[0])} It was charged.")
        return replies[0]


def _masking(mechanism: Mechanism) -> TwoPartyGaussian:
    if not isinstance(mechanism, TwoPartyGaussian):
        raise InputError(f"mechanism {mechanism.kind!r} has no helper; use DpFedExp.")
    return mechanism


class _Clients:
    """The grid without the helper."""

    def __init__(self, grid: Grid, helper: int) -> None:
        self.grid, self.helper = grid, helper

    def get_node_ids(self) -> list[int]:
        return [node for node in self.grid.get_node_ids() if node != self.helper]


def read_masked(reply: Message, request: Request, columns: int) -> Masked:
    """A client's masked row and sealed seed. Raises `InputError` with the reason if any part of the reply is not as it must be."""
    sent, fields = read_parts(reply, request)
    seed = fields.get("seed")
    if not isinstance(seed, bytes) or len(seed) != SEALED_BYTES:
        raise InputError("its seed is not sealed as it must be")
    return Masked(strict_array(sent, "uint64", (columns,)).astype(np.uint64, copy=False), seed)


def read_answer(reply: Message, round_: Round, digest: str) -> Words:
    """The helper's sum, if it is for this round and this set of clients."""
    try:
        arrays, fields = reply.content.array_records.get(REPORT), reply.content.config_records.get(HELPER)
        if arrays is None or fields is None or set(arrays) != {"vector"}:
            raise InputError("it holds no sum")
        same = fields.get("nonce") == round_.nonce and fields.get("digest") == digest
        require(same, "it is for another round or another set of clients")
        return strict_array(arrays["vector"], "uint64", (round_.columns,)).astype(np.uint64, copy=False)
    except InputError as reason:
        raise RoundFailed(
            f"round {round_.number} failed: the helper's answer can't be used: {reason}. It was charged."
        ) from None
