"""A node's Runtime API, over which the app gets the model and returns what it trained: for the app's user alone.

Formal guarantee: with `--isolation subprocess` only processes of the node's own user are answered. With `--isolation process` only
those of a user, or of another machine's address, that has shown the SuperExec's secret. Another user who has read a token gets
nothing for it. (Users of the same machine are known on Linux only.)
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import import_module
from typing import Any

import uvicorn

from dpfedexp.flower.local_users import core_dumpers, peer

_log = logging.getLogger("flwr")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

ACQUIRE = "/v1/runtime/acquire-task"
_OK, _NOT_FOUND = 200, 404


class AppsOnly:
    """Flower's Runtime API, answered to the app's user; others get 404.

    Args:
        application: Flower's.
        apart: whether the app is another user's, who shows the secret; otherwise it is this process's own user's.
    """

    def __init__(self, application: Any, apart: bool) -> None:
        self._application, self._apart = application, apart
        self._admitted = set() if apart else {f"user {os.geteuid()}", "user"}
        self._told: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._application(scope, receive, send)
            return
        who = peer(scope.get("client"), scope.get("server"))
        asks = self._apart and scope["type"] == "http" and scope["path"] == ACQUIRE
        reason = self._refusal(who, asks)
        if reason:
            if reason not in self._told:
                self._told.add(reason)
                _log.warning("%s", reason)
            await _refuse(scope, send)
            return

        async def watched(event: MutableMapping[str, Any]) -> None:
            # Flower has checked the secret.
            if asks and event["type"] == "http.response.start" and event["status"] == _OK:
                self._admitted.add(str(who))
            await send(event)

        await self._application(scope, receive, watched)

    def _refusal(self, who: str | None, asks: bool) -> str:
        """Why a request is not passed on, "" where it is."""
        if who is None or (who not in self._admitted and not asks):
            return f"a process of {who or 'an unknown user'} reached for the app's task and got nothing."
        number = who.removeprefix("user ")
        dumpers = core_dumpers(int(number)) if asks and number.isdecimal() else []
        if dumpers:
            return (
                f"the app's process {dumpers[0]} may dump core, with the data in it, and gets no task: start it with "
                "`dpfedexp superexec`, which forbids that, instead of `flower-superexec`."
            )
        return ""


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": _NOT_FOUND, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "websocket.close", "code": 1000})


def serve_runtime(config: Any, state_factory: Any) -> tuple[uvicorn.Server, threading.Thread]:
    """In the place of Flower's `_start_supernode_http_api`: the same server, in a thread, with `AppsOnly` in front."""
    flower: Any = import_module("flwr.supernode.main")
    whole = flower.create_app(state_factory=state_factory, superexec_auth_secret=config.superexec_auth_secret)
    server = uvicorn.Server(
        uvicorn.Config(
            AppsOnly(whole, apart=config.isolation == "process"),
            host=config.host,
            port=config.port,
            access_log=False,
            ssl_certfile=config.runtime_ssl_certfile,
            ssl_keyfile=config.runtime_ssl_keyfile,
            # A name that a client puts into a header is not where it comes from.
            proxy_headers=False,
        )
    )
    thread = threading.Thread(target=server.run, name="supernode-runtime-http-api")
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.1)
    if not server.started:
        raise RuntimeError("the Runtime API failed to start; the log says why.")
    return server, thread
