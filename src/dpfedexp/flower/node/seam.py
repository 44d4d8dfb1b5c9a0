"""Where a site's decisions meet Flower: two functions of flwr 1.41.0 that every message passes in the SuperNode's own process.

`_pull_and_store_message` brings a message in. Here all of it is fetched and judged before Flower is told that it exists, so an
app that is not on the list, or a request beyond the limits, starts nothing. `_push_messages` brings an answer out. Here it is
handed a message that the site made, from a store of its own that no app can reach; what the app returned is deleted. Around
Flower's `send` and `push_object` stands a last check that lets nothing else pass.

Both are private to Flower, so its version is pinned, and `install` refuses any other.
"""

from __future__ import annotations

import logging
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from flwr.app import Message, Metadata
from flwr.common.constant import SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException

from dpfedexp.errors import InputError
from dpfedexp.flower.messages import REFUSAL
from dpfedexp.flower.node.mod import ENFORCED
from dpfedexp.flower.node.price import Refused
from dpfedexp.flower.node.runtime import serve_runtime
from dpfedexp.flower.node.site import Admitted, Site, refusal
from dpfedexp.flower.versions import check_flower

_log = logging.getLogger("flwr")

flower: Any = import_module("flwr.supernode.start_client_internal")
command: Any = import_module("flwr.supernode.cli.flower_supernode")

PULL = [
    "state",
    "object_store",
    "node_config",
    "receive",
    "get_run",
    "get_fab",
    "pull_object",
    "confirm_message_received",
    "trusted_entities",
]
SERVE = ["config", "state_factory"]
PUSH = ["state", "object_store", "send", "push_object"]


@dataclass
class Seam:
    """What stands between Flower's SuperNode and the network for one site.

    Args:
        site: what may come in and go out.
        patience: seconds that an app may take for an answer, where the request itself does not end earlier.
        poll: seconds between two questions to the SuperLink.
    """

    site: Site
    patience: float = 3600.0
    poll: float = 1.0
    _pull: Callable[..., int | None] = field(default=flower._pull_and_store_message, repr=False)
    _push: Callable[..., None] = field(default=flower._push_messages, repr=False)
    _admitted: Admitted | None = None
    _answer: Message | None = None
    _deadline: float = 0.0

    def install(self) -> None:
        """Replaces Flower's two functions; a sentence that names the one that is not where it was."""
        check_flower("node", flower, {"_pull_and_store_message": PULL, "_push_messages": PUSH})
        flower._pull_and_store_message, flower._push_messages = self.pull, self.push

    def pull(self, **given: Any) -> int:
        """Waits for a message, and returns when it is either stored for the app or has its answer already."""
        while (run := self._pull_one(**given)) is None:
            time.sleep(self.poll)
        return run

    def _pull_one(self, **given: Any) -> int | None:
        self._admitted = self._answer = None
        try:
            received = given["receive"]()
        except RunNotRunningException:
            return None
        if received is None:
            return None
        header, tree = received
        run_id = header.metadata.run_id
        try:
            try:
                state = given["state"]
                run = state.get_run(run_id) or given["get_run"](run_id)
                fab = state.get_fab(run.fab_hash) or given["get_fab"](run.fab_hash, run_id)
                self.site.check_app(fab.content, run.fab_hash)
                if run.primary_task_type == TaskType.AGENT_APP or run.run_id != run_id:
                    raise Refused("the site answers training only.")
                ids = [node.object_id for node in iterate_object_tree(tree)]
                contents = pull_objects(ids, pull_object_fn=lambda key: given["pull_object"](run_id, key))
                message = _inflate(tree.object_id, dict(contents))
                message.metadata.__dict__["_message_id"] = tree.object_id
                if _names(message) != _names(header):
                    raise Refused("the message is not the one that was announced.")
                helped = self.site.helped(message)
                admitted = None if helped else self.site.admit(message, run.fab_hash)
            except RunNotRunningException:
                return None
            except Refused:
                raise
            except Exception as error:
                _log.error("a message could not be fetched", exc_info=error)
                raise Refused("the message can't be read.") from None
        except Refused as reason:
            _log.warning("this site refused a request: %s", reason)
            self._answer = refusal(header, REFUSAL + reason.shown)
            return int(run_id)
        if helped is not None:
            self._answer = helped
            return int(run_id)
        stored = self._pull(
            **{
                **given,
                "receive": lambda: (header, tree),
                "get_run": lambda _: run,
                "get_fab": lambda *_: fab,
                "pull_object": lambda _, key: contents[key],
                "trusted_entities": None,
            }
        )
        if stored is not None:
            self._admitted = admitted
            # From now on and not from when it was sent: the server's clock is another one.
            self._deadline = time.monotonic() + min(self.patience, float(header.metadata.ttl))
        return stored

    def push(self, state: Any, object_store: ObjectStore, send: Any, push_object: Any) -> None:
        """Sends the site's own answer to the message that came in last, and nothing else."""
        if self._admitted is not None:
            trained = self._returned(state, object_store, self._admitted.message.metadata)
            self._answer = self.site.answer(self._admitted, trained)
        answer, self._admitted, self._answer = self._answer, None, None
        if answer is None:
            return
        answer.metadata.__dict__["_message_id"] = answer.object_id
        objects = get_all_nested_objects(answer)
        store = ObjectStoreFactory().store()
        store.preregister(answer.metadata.run_id, get_object_tree(answer))
        for key, value in objects.items():
            store.put(key, value.deflate())

        def sending(message: Message, tree: Any, _: float) -> Any:
            # How long the app took is known to the site alone.
            return send(message, tree, 0.0) if message is answer else _never()

        def pushing(run_id: int, session: str, key: str, content: bytes) -> None:
            push_object(run_id, session, key, content) if key in objects else _never()

        self._push(_Outbox(state, answer), store, sending, pushing)

    def _returned(self, state: Any, store: ObjectStore, asked: Metadata) -> Message | None:
        """What the app returned for this message, None if it can't be read or came too late. All else is deleted."""
        while time.monotonic() < self._deadline:
            replies = list(state.get_messages_legacy(is_reply=True))
            mine = [reply for reply in replies if reply.metadata.reply_to_message_id == asked.message_id]
            try:
                if mine:
                    return _whole(store, mine[0].metadata.message_id, self._deadline)
            except Exception as error:
                _log.error("what the app returned can't be read", exc_info=error)
                return None
            finally:
                for reply in replies:
                    state.delete_messages(message_ids=[reply.metadata.message_id])
                    store.delete(reply.metadata.message_id)
            time.sleep(0.1)
        _log.error("the app did not answer before the request or the site's patience ended")
        _end_tasks(state, asked.run_id)
        return None


@dataclass(frozen=True)
class _Outbox:
    """All of the node's state that Flower's `_push_messages` gets to see: one message, and the deletion of what it answers."""

    state: Any
    answer: Message

    def get_messages_legacy(self, *, is_reply: bool) -> list[Message]:
        return [self.answer]

    def get_message_processing_duration(self, *, message_id: str) -> float:
        return 0.0

    def delete_messages(self, *, message_ids: Sequence[str]) -> None:
        self.state.delete_messages(message_ids=message_ids)


def _end_tasks(state: Any, run: int) -> None:
    """Takes back the tokens of a request that has ended: a process that is late can neither return nor take anything."""
    for task in state.get_tasks(run_ids=[run]):
        state.finish_task(task.task_id, sub_status=SubStatus.STOPPED, details="The request has ended.")


def _whole(store: ObjectStore, key: str, deadline: float) -> Message:
    """A message with all its parts, which an app sends one after the other."""
    contents: dict[str, bytes] = {}
    for node in iterate_object_tree(store.get_object_tree(key)):
        while (content := store.get(node.object_id)) == b"" and time.monotonic() < deadline:
            time.sleep(0.05)
        if not content:
            raise InputError("a part of it is missing.")
        contents[node.object_id] = content
    return _inflate(key, contents)


def _inflate(key: str, contents: dict[str, bytes]) -> Message:
    message = inflate_object_from_contents(key, contents)
    if not isinstance(message, Message):
        raise InputError("it is not a message.")
    return message


def _names(message: Message) -> tuple[int, str, str]:
    about = message.metadata
    return about.run_id, about.message_type, about.message_id


def _never() -> Any:
    raise RuntimeError("Flower tried to send what the site did not make.")


def _start_superexec(words: Sequence[str]) -> subprocess.Popen[bytes]:
    """In the place of `flower-superexec`, which Flower starts with `--isolation subprocess`."""
    return subprocess.Popen([sys.executable, "-m", "dpfedexp", "superexec", *words[1:]])


def run_node(options: Sequence[str], seam: Seam) -> None:
    """Flower's SuperNode with these options, behind the seam. Runs until it is stopped."""
    seam.install()
    check_flower("node", command, {"_parse_supernode_lifespan_config": [], "_start_supernode_http_api": SERVE})
    parse = command._parse_supernode_lifespan_config

    def parsed() -> Any:
        config = parse()
        config.node_config = {**config.node_config, ENFORCED: secrets.token_hex(16)}
        return config

    command._parse_supernode_lifespan_config = parsed
    command._start_supernode_http_api = serve_runtime
    flower.subprocess = SimpleNamespace(Popen=_start_superexec)
    sys.argv = ["flower-supernode", *options]
    command.flower_supernode()
