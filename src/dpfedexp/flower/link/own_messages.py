"""A node reaches its own messages and no other's, and can't learn whether another's exist.

Flower 1.41 checks a node's signature and then believes what it says: it may answer in another's name, delete another's message,
and fetch any object whose hash it knows. Objects are named by the hash of their content, and Flower tells who uploads one whether
somebody else has done so already. So a node that guesses another's update, such as that of a client without data, could see
that it is there.

Formal guarantee: what a node is answered here depends on its own messages, on the runs, and on nothing that other nodes sent.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from fastapi import HTTPException
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectResponse, PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree

from dpfedexp.flower.versions import check_flower

handlers: Any = import_module("flwr.superlink.servicer.fleet.fleet_handlers")

_STATE, _BOTH = ["request", "state"], ["request", "state", "store"]
EXPECTED = {
    "pull_messages": _BOTH,
    "pull_object": _STATE,
    "confirm_message_received": _BOTH,
    "push_messages": _STATE,
    "push_object": _STATE,
}
"""The functions of Flower's that are put behind this, and their arguments."""


class OwnMessages:
    """Flower's handlers of a node's messages, each for the node's own only. A node has one message at a time, either way."""

    def __init__(self) -> None:
        self._flower = {name: getattr(handlers, name) for name in EXPECTED if hasattr(handlers, name)}
        self._pulled: dict[int, tuple[str, frozenset[str]]] = {}
        self._pushed: dict[int, tuple[str, frozenset[str]]] = {}

    def install(self) -> None:
        """Replaces Flower's functions; a sentence that names the one that is not where it was."""
        check_flower("superlink", handlers, EXPECTED)
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
        """An answer of the node that signed; all of its objects are asked for, whether or not somebody has sent the same."""
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
