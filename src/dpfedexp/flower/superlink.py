"""`dpfedexp superlink`: Flower's SuperLink with access control.

Flower 1.41 serves three APIs on one port: Fleet, for nodes, which checks their signatures; Control, which starts apps and
registers keys and checks nothing; and Runtime, for the server app. Here the port for nodes serves only the Fleet paths. The other
port is on loopback, and on Linux it serves only root and the user that runs the SuperLink.

Flower checks a node's signature and then trusts the request: a node may answer in another's name, delete another's message, and
fetch any object whose hash it knows. Objects are named by the hash of their content, and Flower tells an uploader whether another
node has uploaded the same object. So a node could confirm a guess of another's update, such as that of a client without data.

Formal guarantee: from the network only Fleet requests reach Flower, and where nodes authenticate, only those signed with a listed
key. The responses to a node depend on its own messages and on the runs, and on nothing that other nodes sent. The state is in
memory: nothing that a node sends is written to disk.
"""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import HTTPException
from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse, PushObjectResponse
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree
from flwr.supercore.logger import console_handler
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import FederationManager

from dpfedexp.errors import require
from dpfedexp.flower import access
from dpfedexp.flower.access import Receive, Scope, Send

flower: Any = import_module("flwr.superlink.main")
command: Any = import_module("flwr.superlink.cli.flower_superlink")
handlers: Any = import_module("flwr.superlink.servicer.fleet.fleet_handlers")

PRIVATE = {
    "create_app": "config superlink_lifespan_class",
    "get_objectstore_linkstate_factories": "database federation_manager",
}
"""Flower's functions that are called or replaced here, and their arguments."""
LOOPBACK = "127.0.0.1"
_OURS = {
    "--host": "--fleet",
    "--port": "--fleet",
    "--database": "no database: the state is in memory, so that no update is ever on disk",
    "--simulation": "flwr run . local",
}
EXPECTED = {
    **dict.fromkeys(("pull_messages", "confirm_message_received"), "request state store"),
    **dict.fromkeys(("pull_object", "push_messages", "push_object"), "request state"),
}
"""Flower's message handlers that `NodeMessages` replaces, and their arguments."""
FLEET = frozenset(
    f"/v1/fleet/{name}"
    for name in (
        *("register-node", "activate-node", "deactivate-node", "unregister-node", "send-node-heartbeat"),
        *("pull-messages", "push-messages", "get-run", "get-fab"),
        *("push-object", "pull-object", "confirm-message-received"),
    )
)
"""All paths that a SuperNode requests."""
_HEARTBEAT = 30.0


def serve(options: Sequence[str], *, fleet: str, control_port: int, nodes: Path) -> None:
    """Run the SuperLink until it is stopped.

    Args:
        options: options of Flower's SuperLink, such as `--ssl-certfile`.
        fleet: the host:port that nodes connect to.
        control_port: the port on loopback for `flwr run` and for the server app.
        nodes: the public keys of the nodes that may connect, read once.
    """
    access.check_flower("superlink", flower, PRIVATE)
    for option in (option.partition("=")[0] for option in options if option.startswith("--")):
        # Flower accepts abbreviated options.
        for name, instead in _OURS.items():
            require(not name.startswith(option), f"{option} is not an option of dpfedexp superlink; use {instead}.")
    host, port = access.parse_address(fleet, "fleet")
    keys = access.read_keys(nodes)
    own = ["--host", LOOPBACK, "--port", str(control_port), "--disable-runtime-dependency-installation"]
    # Flower refuses the option --insecure beside authentication.
    sys.argv = ["flower-superlink", *own, "--enable-supernode-auth", *options]
    config = command._parse_superlink_lifespan_config()
    NodeMessages().install()
    flower.get_objectstore_linkstate_factories = lambda _, manager: memory_factories(manager, keys)
    whole = flower.create_app(config, command.SuperLinkLifespan)
    given: dict[str, Any] = {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "log_config": get_uvicorn_log_config(console_handler.level),
        # Clients can forge the proxy headers that name an address.
        "proxy_headers": False,
    }
    inner = uvicorn.Server(uvicorn.Config(FilteredApp(whole, is_own_user), host=LOOPBACK, port=control_port, **given))
    outer = uvicorn.Server(uvicorn.Config(FilteredApp(whole, is_fleet), host=host, port=port, lifespan="off", **given))
    asyncio.run(_both(inner, outer))


async def _both(inner: uvicorn.Server, outer: uvicorn.Server) -> None:
    """Run both servers. Nodes are admitted once the state exists; when one server stops, the other stops too."""
    first = asyncio.create_task(inner.serve())
    while not (inner.started or first.done()):
        await asyncio.sleep(0.05)
    second = asyncio.create_task(outer.serve())
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    inner.should_exit = outer.should_exit = True
    await asyncio.gather(first, second)


class FilteredApp:
    """An ASGI application that serves only requests admitted by `admits`; others get 404."""

    def __init__(
        self, application: Callable[[Scope, Receive, Send], Awaitable[None]], admits: Callable[[Scope], bool]
    ) -> None:
        self._application, self._admits = application, admits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or (scope["type"] == "http" and self._admits(scope)):
            await self._application(scope, receive, send)
        else:
            await access.answer_nothing(scope, send)


def is_fleet(scope: Scope) -> bool:
    return scope["method"] == "POST" and scope["path"] in FLEET


def is_own_user(scope: Scope) -> bool:
    """Whether the other end of a loopback connection is this process's user or root. Outside Linux users are unknown: True."""
    return access.peer(scope.get("client"), scope.get("server")) in (f"user {os.geteuid()}", "user 0", "user")


class KeyedLinkState(InMemoryLinkState):
    """Flower's in-memory state, with node ids computed from the nodes' keys."""

    def create_node(self, owner_aid: str, owner_name: str, public_key: bytes, *rest: Any, **named: Any) -> int:
        with self.lock:
            drawn = super().create_node(owner_aid, owner_name, public_key, *rest, **named)
            if not drawn:
                return drawn
            own = access.node_id(public_key)
            if own in self.nodes:
                raise ValueError("another key has this node's id")
            info = self.nodes.pop(drawn)
            info.node_id = own
            self.nodes[own] = info
            self.node_public_key_to_node_id[public_key] = own
            self.owner_to_node_ids[owner_aid] -= {drawn}
            self.owner_to_node_ids[owner_aid] |= {own}
            return own


def memory_factories(manager: FederationManager, keys: Iterable[bytes]) -> tuple[ObjectStoreFactory, LinkStateFactory]:
    """Factories for Flower's state: in memory, with the keys of these nodes registered."""
    objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, manager, objects)
    state = KeyedLinkState(manager, objects.store())
    for key in keys:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, _HEARTBEAT)
    factory.state_instance = state
    return objects, factory


class NodeMessages:
    """Flower's message handlers, limited to each node's own messages.

    A node receives and sends one message at a time, so the newest of each is stored.
    """

    def __init__(self) -> None:
        self._flower = {name: getattr(handlers, name) for name in EXPECTED if hasattr(handlers, name)}
        self._pulled: dict[int, tuple[str, frozenset[str]]] = {}
        self._pushed: dict[int, tuple[str, frozenset[str]]] = {}

    def install(self) -> None:
        """Replace Flower's functions; raises `InputError` if one of them has changed."""
        access.check_flower("superlink", handlers, EXPECTED)
        for name in EXPECTED:
            setattr(handlers, name, getattr(self, name))

    def pull_messages(self, request: Any, state: Any, store: Any) -> Any:
        response = self._flower["pull_messages"](request=request, state=state, store=store)
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            self._pulled[request.node.node_id] = message.metadata.message_id, _objects(tree)
        return response

    def pull_object(self, request: Any, state: Any) -> Any:
        _, objects = self._pulled.get(request.node.node_id, ("", frozenset()))
        if request.object_id not in objects:
            return PullObjectResponse(object_found=False, object_available=False)
        return self._flower["pull_object"](request=request, state=state)

    def confirm_message_received(self, request: Any, state: Any, store: Any) -> Any:
        message, _ = self._pulled.get(request.node.node_id, ("", frozenset()))
        if request.message_object_id != message:
            return ConfirmMessageReceivedResponse()
        return self._flower["confirm_message_received"](request=request, state=state, store=store)

    def push_messages(self, request: Any, state: Any) -> Any:
        """Accept an answer of the node that signed it. All of its objects are requested, even if another node has sent the same."""
        node, messages, trees = request.node.node_id, request.messages_list, request.message_object_trees
        own = len(messages) == len(trees) == 1 and messages[0].metadata.src_node_id == node
        if not own:
            raise HTTPException(status_code=403, detail="a node answers in its own name only")
        response = self._flower["push_messages"](request=request, state=state)
        objects = _objects(trees[0])
        if response.objects_to_push:
            del response.objects_to_push[:]
            response.objects_to_push.extend(sorted(objects))
        self._pushed[node] = response.session_id, objects
        return response

    def push_object(self, request: Any, state: Any) -> Any:
        session, objects = self._pushed.get(request.node.node_id, ("", frozenset()))
        own = session and request.session_id == session and request.object_id in objects
        if not own or get_object_id(request.object_content) != request.object_id:
            return PushObjectResponse(stored=False)
        self._flower["push_object"](request=request, state=state)
        return PushObjectResponse(stored=True)


def _objects(tree: Any) -> frozenset[str]:
    return frozenset(node.object_id for node in iterate_object_tree(tree))
