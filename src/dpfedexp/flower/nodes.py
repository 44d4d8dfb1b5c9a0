"""Who is asked, and what came back: the places of a run, waiting for nodes, and the exchange of messages with a deadline."""

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
class Places:
    """The places of a run.

    Formal guarantee: a node that comes changes nothing but its own contribution. Under add-remove adjacency every connected node
    may be asked; otherwise there is a fixed number of places, and a place belongs to the node that took it first.

    Attributes:
        count: how many nodes the run has, a public number.
        min_reply_fraction: the fraction of them that must be there for a round to begin.
        timeout: seconds to wait for them.
        open_to_all: whether every connected node takes part, as under add-remove adjacency.
        rebind: whether the places of nodes that are gone are free when the run goes on.
        taken: the nodes that have a place, in the order in which they took them.
        allowed: the only nodes that may be asked, sorted; None where any node that is connected may.
    """

    count: int
    min_reply_fraction: float
    timeout: float
    open_to_all: bool = False
    rebind: bool = False
    taken: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    _begun: bool = False

    def allow(self, nodes: tuple[int, ...]) -> None:
        """Gives the run's places to these nodes and no others."""
        require(
            len(nodes) == self.count,
            f"the list of nodes names {len(nodes)}, and the run has {self.count} (clients divided by clients_per_node).",
        )
        require(not self.rebind, "rebind is true beside a list of nodes, which says who takes part; change the list.")
        self.allowed = nodes

    def nodes_of_round(self, grid: Grid) -> list[int]:
        """Who can be asked: all that are connected where the run is open, otherwise those with a place that are connected.

        One that is absent is a reply that is missing. Only the first round waits for all: a node that is gone is not waited for.
        """
        enough, begun = max(1, math.ceil(self.min_reply_fraction * self.count)), self._begun
        wanted, self._begun = enough if begun else self.count, True

        rebind = self.rebind and not begun

        def places(connected: Sequence[int]) -> tuple[int, ...]:
            if self.open_to_all:
                return tuple(connected) if self.allowed is None else self.allowed
            kept = tuple(node for node in self.taken if node in connected) if rebind else self.taken
            return seated(connected, kept, self.count)

        if self.open_to_all:
            return wait_for_nodes(grid, wanted, enough, self.timeout, places, secret=True)
        if self.allowed is not None:
            self.taken = self.allowed
        here = wait_for_nodes(grid, wanted, enough, self.timeout, places)
        before, self.taken = self.taken, places(here)
        left_out = [node for node in grid.get_node_ids() if node not in self.taken]
        if left_out and not before and self.allowed is None:
            _log.warning(
                "%d nodes are connected that have no place in this run; name those that shall have one in federation.nodes",
                len(left_out),
            )
        new = len(set(self.taken) - set(before))
        if before and new:
            _log.warning("%d nodes that were not in this run before took free places in it", new)
        return here


def seated(connected: Sequence[int], bound: tuple[int, ...], places: int) -> tuple[int, ...]:
    """Who has a place in the run, in the order in which places were taken.

    A place belongs to the node that took it first, whether or not it is connected now, so that a node that comes later never
    changes what another contributes. Free places go to the connected nodes with the lowest ids.

    Flower gives an id to a key. A SuperNode with a key of its own (`--auth-supernode-private-key`) has the same id after any
    restart; without one it draws a new key, and with it gets a new id, whenever it starts. It is then another node, and the place
    of the old one stays empty until the run is resumed with `rebind`.
    """
    free = [node for node in sorted(connected) if node not in bound]
    return (*bound, *free[: max(0, places - len(bound))])


def wait_for_nodes(
    grid: Grid,
    wanted: int,
    needed: int,
    seconds: float,
    places: Callable[[Sequence[int]], tuple[int, ...]],
    secret: bool = False,
) -> list[int]:
    """Ids of connected nodes that have a place, sorted: as soon as `wanted` are there, or at the deadline if `needed` are.

    Neither log nor error says how many there are where that is `secret`.
    """
    deadline = time.monotonic() + seconds
    told = False
    while True:
        connected = sorted(grid.get_node_ids())
        having = places(connected)
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
                    f" Connected are also {more} nodes that have no place in this run: a SuperNode without a key of its own is "
                    "another node after a restart. Resume with rebind=true to give them the places of nodes that are gone."
                )
            raise RoundFailed(text)
        if not told:
            _log.info("Waiting up to %g s for nodes: %s are connected", seconds, here)
            told = True
        time.sleep(1.0)


def choose(nodes: Sequence[int], hosted: int, sampling: Sampling) -> dict[int, tuple[int, ...]]:
    """The clients of one round, by node: all that it hosts, or each on its own with probability `rate`, from system entropy."""
    if sampling.kind == "full":
        return {node: tuple(range(hosted)) for node in nodes}
    entropy = secrets.SystemRandom()
    drawn = {node: tuple(c for c in range(hosted) if entropy.random() < sampling.rate) for node in nodes}
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
