"""Who is asked, and what came back: waiting for nodes, sampling from system entropy, exchanging messages with a deadline."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from dpfedexp.accounting.events import Sampling
from dpfedexp.errors import RoundFailed

_log = logging.getLogger("flwr")

Asked = dict[int, tuple[int, ...]]
"""Node id → which of its hosted clients; (0,) on a node that is one client."""


def seated(connected: Sequence[int], bound: tuple[int, ...], places: int) -> tuple[int, ...]:
    """Who has a place in the run, in the order in which places were taken.

    A place belongs to the node that took it first, whether or not it is connected now, so that a node that comes later never
    changes what another contributes. Free places go to the connected nodes with the lowest ids.

    Flower 1.41 gives an id to a key. A SuperNode with a key of its own (`--auth-supernode-private-key`, registered with the
    SuperLink, whose database is kept) has the same id after any restart; without one it draws a new key, and with it gets a new id,
    whenever it starts. It is then another node, and the place of the old one stays empty until the run is resumed with `rebind`.
    """
    free = [node for node in sorted(connected) if node not in bound]
    return (*bound, *free[: max(0, places - len(bound))])


def wait_for_nodes(
    grid: Grid,
    wanted: int,
    needed: int,
    seconds: float,
    *,
    taking_part: Callable[[Sequence[int]], Sequence[int]] = tuple,
    secret: bool = False,
    poll: float = 1.0,
) -> list[int]:
    """Ids of connected nodes that take part, sorted: as soon as `wanted` are there, or at the deadline if at least `needed` are.

    Neither log nor error says how many there are where that is `secret`.
    """
    deadline = time.monotonic() + seconds
    told = False
    while True:
        connected = sorted(grid.get_node_ids())
        nodes = sorted(taking_part(connected))
        if len(nodes) >= wanted:
            return nodes
        if time.monotonic() >= deadline:
            if len(nodes) >= needed:
                return nodes
            raise RoundFailed(_too_few(len(nodes), len(connected), wanted, needed, seconds, secret))
        if not told:
            here = "too few" if secret else f"{len(nodes)} of {wanted}"
            _log.info("Waiting up to %g s for nodes: %s are connected", seconds, here)
            told = True
        time.sleep(poll)


def _too_few(here: int, connected: int, wanted: int, needed: int, seconds: float, secret: bool) -> str:
    who = "too few" if secret else f"{here} of {wanted}"
    text = (
        f"{who} nodes were connected after waiting {seconds:g} seconds, and the round needs at least {needed}. Start more "
        "SuperNodes, or lower the floor; then resume."
    )
    if connected > here:
        text += (
            f" Connected are also {connected - here} nodes that have no place in this run: a SuperNode without a key of its own is "
            "another node after a restart. Resume with rebind=true to give them the places of nodes that are gone."
        )
    return text


def choose(nodes: Sequence[int], hosted: int, sampling: Sampling) -> Asked:
    """The clients of one round: all of them, or each on its own with probability `rate`."""
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
