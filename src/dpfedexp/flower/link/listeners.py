"""What of a SuperLink can be reached from where.

Flower 1.41 serves three things on one port: Fleet, which nodes need and which checks their signatures; Control, with which apps
are started and keys registered, and which checks nothing; and Runtime, for the server app. Here the port that nodes reach has the
Fleet paths and nothing else. The other one is on loopback, and on Linux it serves only the user that the SuperLink runs as, and
root.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        "register-node",
        "activate-node",
        "deactivate-node",
        "unregister-node",
        "send-node-heartbeat",
        "pull-messages",
        "push-messages",
        "get-run",
        "get-fab",
        "push-object",
        "pull-object",
        "confirm-message-received",
    )
)
"""All that a SuperNode of flwr 1.41 asks for."""

_ESTABLISHED = "01"


class Only:
    """An application of which only what `admits` says is served; the rest is answered with 404, whatever it is.

    Args:
        application: the whole of it.
        admits: from a request's scope to whether it is served.
    """

    def __init__(self, application: Application, admits: Callable[[Scope], bool]) -> None:
        self._application, self._admits = application, admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._admits(scope)):
            await self._application(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1000})


def is_fleet(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in FLEET


def is_own_user(scope: Scope) -> bool:
    """Whether the other end of a loopback connection is this process's user or root. Only Linux tells; elsewhere True."""
    table = Path("/proc/net/tcp")
    if not table.exists():
        return True
    client, server = scope.get("client"), scope.get("server")
    if client is None or server is None:
        return False
    try:
        lines = table.read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return False
    # Established only: a socket that its owner has closed already is listed as root's.
    wanted = [_address(*client), _address(*server), _ESTABLISHED]
    owners = {int(fields[7]) for fields in map(str.split, lines) if fields[1:4] == wanted}
    return bool(owners) and owners <= {os.geteuid(), 0}


def _address(host: str, port: int) -> str:
    """As /proc/net/tcp writes it: the address in the machine's byte order."""
    import socket
    import sys

    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
