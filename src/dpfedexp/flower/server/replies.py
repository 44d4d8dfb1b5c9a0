"""From what came back to sums: at most one reply per node, each checked whole before it counts."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import Message

from dpfedexp.accounting import Sampling
from dpfedexp.core.sums import Sums
from dpfedexp.errors import InputError, RoundFailed, require
from dpfedexp.flower.messages import REFUSAL, Request, read_sums
from dpfedexp.mechanisms import Mechanism

_log = logging.getLogger("flwr")

T = TypeVar("T")


@dataclass(frozen=True)
class Counts:
    """Clients of one round, counted against the messages that were sent: Flower itself reports a hung client as no failure."""

    asked: int
    valid: int
    refused: int

    @property
    def missing(self) -> int:
        return self.asked - self.valid - self.refused

    def shown(self) -> dict[str, int]:
        return {"asked": self.asked, "valid": self.valid, "refused": self.refused, "missing": self.missing}


def add_replies(
    replies: Iterable[Message], sent: Mapping[int, Request], width: int, *, name_nodes: bool, votes: int = 0
) -> tuple[Sums, Counts]:
    """The sums over valid replies, with so many votes. `name_nodes`: whether the log may say which node was asked."""
    sums = Sums.zero(width, votes=votes)

    def add(reply: Message, request: Request) -> None:
        nonlocal sums
        sums = sums.take(read_sums(reply, request, width))

    _, refused = read_replies(replies, sent, add, name_nodes=name_nodes)
    return sums, Counts(sum(request.size for request in sent.values()), sums.count, refused)


def read_replies(
    replies: Iterable[Message], sent: Mapping[int, Request], read: Callable[[Message, Request], T], *, name_nodes: bool
) -> tuple[dict[int, T], int]:
    """What `read` makes of the first reply of every node that was asked, by node, and how many clients' were refused.

    Args:
        replies: as they come.
        sent: what every node was asked.
        read: raises `InputError` for a reply that is not as it must be.
        name_nodes: whether the log may say which node was asked.
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


def check_floor(
    number: int, counts: Counts, mechanism: Mechanism, sampling: Sampling, clients: int, floor: float
) -> None:
    """Raises `RoundFailed` where fewer than the floor answered: dropouts never weaken the guarantee, but a model that is moved by
    noise alone helps nobody.

    Args:
        number: the round.
        counts: who answered.
        mechanism: of the round.
        sampling: who was asked.
        clients: how many there are.
        floor: the fraction of the clients asked that must answer well.
    """
    of = clients if sampling.kind == "full" else counts.asked
    needed = math.ceil(floor * of)
    if counts.valid >= needed:
        return
    why = f"{counts.valid} of {of} clients answered well, and the floor is {needed}"
    if not mechanism.counts_are_public(sampling):
        why = f"fewer than {floor:.0%} of the clients that were asked answered well"
    cost = "It was charged: the reports had been sent." if mechanism.is_local else "Nothing was released or charged."
    raise RoundFailed(f"round {number} failed: {why}. {cost} Resume to try it again.")
