"""Who is asked, and what came back: waiting for nodes, sampling from system entropy, exchanging messages with a deadline."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from dpfedexp.accounting.events import Sampling
from dpfedexp.errors import RoundFailed

_log = logging.getLogger("flwr")

Asked = dict[int, tuple[int, ...]]
"""Node id → which of its hosted clients; (0,) on a node that is one client."""


def wait_for_nodes(grid: Grid, wanted: int, needed: int, seconds: float, poll: float = 1.0) -> list[int]:
    """Ids of connected nodes, sorted: as soon as `wanted` are there, or at the deadline if at least `needed` are."""
    deadline = time.monotonic() + seconds
    told = False
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= wanted:
            return nodes
        if time.monotonic() >= deadline:
            if len(nodes) >= needed:
                return nodes
            raise RoundFailed(
                f"{len(nodes)} of {wanted} nodes were connected after waiting {seconds:g} seconds, and the round needs at least "
                f"{needed}. Start more SuperNodes, or lower the number of clients or the floor; then resume."
            )
        if not told:
            _log.info("Waiting up to %g s for nodes: %d of %d are connected", seconds, len(nodes), wanted)
            told = True
        time.sleep(poll)


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
