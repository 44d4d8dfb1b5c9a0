"""Who is asked, and what came back: the participants of a run, waiting for nodes, and the exchange of messages with a deadline."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flwr.app import Message
from flwr.serverapp import Grid

from dpfedexp.accounting.events import Sampling
from dpfedexp.errors import RoundFailed, require

_log = logging.getLogger("flwr")


@dataclass
class Participants:
    """The nodes that take part in a run.

    Formal guarantee: a node that comes changes nothing but its own contribution. Under add-remove adjacency every connected node
    may be asked; otherwise there is a fixed number of participants, and a node that became one stays one.

    Attributes:
        count: how many nodes the run has, a public number.
        min_reply_fraction: the fraction of them that must be there for a round to begin.
        timeout: seconds to wait for them.
        open_to_all: whether every connected node takes part, as under add-remove adjacency.
        replace_missing_nodes: whether connected nodes replace missing ones when the run is resumed.
        nodes: those that take part, in the order in which they joined.
        allowed: the only nodes that may be asked, sorted; None where any node that is connected may.
    """

    count: int
    min_reply_fraction: float
    timeout: float
    open_to_all: bool = False
    replace_missing_nodes: bool = False
    nodes: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    _begun: bool = False

    def allow(self, nodes: tuple[int, ...]) -> None:
        """Makes these nodes the participants, and no others."""
        require(
            len(nodes) == self.count,
            f"the list of nodes names {len(nodes)}, and the run has {self.count} (clients divided by clients_per_node).",
        )
        require(
            not self.replace_missing_nodes,
            "replace_missing_nodes is true beside a list of nodes, which says who takes part; change the list.",
        )
        self.allowed = nodes

    def nodes_of_round(self, grid: Grid) -> list[int]:
        """Who can be asked: all that are connected where the run is open, otherwise the participants that are connected.

        One that is absent is a reply that is missing. Only the first round waits for all: a node that is gone is not waited for.
        """
        enough, begun = max(1, math.ceil(self.min_reply_fraction * self.count)), self._begun
        wanted, self._begun = enough if begun else self.count, True

        replace_missing_nodes = self.replace_missing_nodes and not begun

        def participants(connected: Sequence[int]) -> tuple[int, ...]:
            if self.open_to_all:
                return tuple(connected) if self.allowed is None else self.allowed
            kept = tuple(node for node in self.nodes if node in connected) if replace_missing_nodes else self.nodes
            return joined(connected, kept, self.count)

        if self.open_to_all:
            return wait_for_nodes(grid, wanted, enough, self.timeout, participants, secret=True)
        if self.allowed is not None:
            self.nodes = self.allowed
        here = wait_for_nodes(grid, wanted, enough, self.timeout, participants)
        before, self.nodes = self.nodes, participants(here)
        left_out = [node for node in grid.get_node_ids() if node not in self.nodes]
        if left_out and not before and self.allowed is None:
            _log.warning(
                "%d nodes are connected that do not take part in this run; name those that shall in federation.nodes",
                len(left_out),
            )
        new = len(set(self.nodes) - set(before))
        if before and new:
            _log.warning("%d nodes that were not in this run before joined it", new)
        return here


def joined(connected: Sequence[int], bound: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Who takes part in the run, in the order in which they joined.

    A participant stays one whether or not it is connected now, so that a node that comes later never changes what another
    contributes. Where there are fewer than `count`, the connected nodes with the lowest ids join.

    Flower gives an id to a key. A SuperNode with a key of its own (`--auth-supernode-private-key`) has the same id after any
    restart; without one it draws a new key, and with it gets a new id, whenever it starts. It is then another node,
    and the old one stays missing until the run is resumed with `replace_missing_nodes`.
    """
    free = [node for node in sorted(connected) if node not in bound]
    return (*bound, *free[: max(0, count - len(bound))])


def wait_for_nodes(
    grid: Grid,
    wanted: int,
    needed: int,
    seconds: float,
    participants: Callable[[Sequence[int]], tuple[int, ...]],
    secret: bool = False,
) -> list[int]:
    """Ids of connected participants, sorted: as soon as `wanted` are there, or at the deadline if `needed` are.

    Neither log nor error says how many there are where that is `secret`.
    """
    deadline = time.monotonic() + seconds
    told = False
    while True:
        connected = sorted(grid.get_node_ids())
        having = participants(connected)
        nodes = [node for node in connected if node in having]
        here = "too few" if secret else f"{len(nodes)} of {wanted}"
        if len(nodes) >= wanted:
            return nodes
        if time.monotonic() >= deadline:
            if len(nodes) >= needed:
                return nodes
            text = (
                f"{here} nodes were connected after waiting {seconds:g} seconds, and the round needs at least {needed}. Start more "
                "SuperNodes, or lower min_reply_fraction; then resume."
            )
            if more := len(connected) - len(nodes):
                text += (
                    f" Connected are also {more} nodes that do not take part in this run: a SuperNode without a key of its own is "
                    "another node after a restart. Resume with replace_missing_nodes=true to let them replace nodes that are gone."
                )
            raise RoundFailed(text)
        if not told:
            _log.info("Waiting up to %g s for nodes: %s are connected", seconds, here)
            told = True
        time.sleep(1.0)


def choose(nodes: Sequence[int], clients_per_node: int, sampling: Sampling) -> dict[int, tuple[int, ...]]:
    """The clients of one round, by node: all of its clients, or each on its own with probability `rate`, from system entropy."""
    if sampling.kind == "full":
        return {node: tuple(range(clients_per_node)) for node in nodes}
    entropy = secrets.SystemRandom()
    drawn = {node: tuple(c for c in range(clients_per_node) if entropy.random() < sampling.rate) for node in nodes}
    return {node: clients for node, clients in drawn.items() if clients}


def exchange(grid: Grid, messages: Sequence[Message], seconds: float, poll: float = 0.5) -> list[Message]:
    """Replies that arrive before the deadline. One that can't even be read is left out, so that no client can stop the server."""
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
            time.sleep(poll)
    return replies


def _pull(grid: Grid, waiting: set[str]) -> list[Message]:
    """The replies that are there; one by one where together they can't be read."""
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
