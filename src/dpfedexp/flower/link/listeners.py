"""What of a SuperLink can be reached from where.

Flower 1.41 serves three things on one port: Fleet, which nodes need and which checks their signatures; Control, with which apps
are started and keys registered, and which checks nothing; and Runtime, for the server app. Here the port that nodes reach has the
Fleet paths and nothing else. The other one is on loopback, and on Linux it serves only the user that the SuperLink runs as, and
root.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dpfedexp.flower.local_users import peer

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
    return peer(scope.get("client"), scope.get("server")) in (f"user {os.geteuid()}", "user 0", "user")
