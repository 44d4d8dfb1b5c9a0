"""`dpfedexp node`: a SuperNode that enforces the site's limits for any uploaded app.

Formal guarantee: whatever an app returns, the site answers a request with one report of the request's mechanism, which is clipped
and randomized here and charged to the site's own ledger first, or with one fixed error text. Reasons that the server sees are
given before the app is started, and depend on the request and the guard file alone. The server still sees whether and when the
site answers: an app can delay, and can fail. `answer_failures = true` in the guard file answers a failure with a charged report of
zero, so that only the time is visible.

The site replaces two functions of Flower that every message passes. `_pull_and_store_message` checks the whole message before
Flower's node stores it. `_push_messages` gets a message that the site made, from a store that no app can reach, and a last check
around Flower's `send` and `push_object` blocks all else. Both functions are private to Flower, so its version is pinned.
"""

import hashlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import uvicorn
from flwr.app import Array, Message, Metadata
from flwr.common.constant import SubStatus
from flwr.supercore.constant import TaskType
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects
from flwr.supercore.object_store import ObjectStore, ObjectStoreFactory
from flwr.supercore.run import RunNotRunningException
from torch import Tensor

from dpfedexp.algorithms.probe import UPDATE
from dpfedexp.core.modules import Layout
from dpfedexp.errors import InputError, require
from dpfedexp.flower.access import Receive, Scope, Send, answer_nothing, check_flower, core_dumpers, peer
from dpfedexp.flower.client import ENFORCED, helper_reply, pinned_key, read_ballots, read_request, reply_content
from dpfedexp.flower.guard import Guard, Refused
from dpfedexp.flower.messages import MODEL, ROWS, NodeRequest, refusal, strict_array

_log = logging.getLogger("flwr")

flower: Any = import_module("flwr.supernode.start_client_internal")
command: Any = import_module("flwr.supernode.cli.flower_supernode")

NO_REPORT = "the app made no report on this site; see the site's log."
_FLOATS = ("float16", "float32", "float64")
ACQUIRE = "/v1/runtime/acquire-task"
PULL = "state object_store node_config receive get_run get_fab pull_object confirm_message_received trusted_entities"
PUSH, SERVE = "state object_store send push_object", "config state_factory"
"""Arguments of Flower's functions that this module replaces."""


@dataclass(frozen=True)
class AdmittedRequest:
    """An admitted request, with its model."""

    message: Message
    request: NodeRequest
    layout: Layout
    w: Tensor
    app: str
    helper_key: str

    @property
    def run(self) -> str:
        return str(self.message.metadata.run_id)


@dataclass(frozen=True)
class Site:
    """The decisions of one site, from its guard file: the operator's limits and the hashes of the allowed apps."""

    guard: Guard

    def check_app(self, content: bytes, claimed: str) -> None:
        """Raise `Refused` unless the hash of the app's content is on the site's list."""
        found = hashlib.sha256(content).hexdigest()
        if found != claimed or found not in self.guard.apps:
            raise Refused(f"the app {found} is not on this site's list.", shown="this app is not on the site's list.")

    def check_overrides(self, given: Iterable[str]) -> None:
        """Raise `Refused` if a run overrides a setting of the Flower app that the guard's `overrides` does not list.

        A guard file without `overrides` allows every override.
        """
        pinned = [] if self.guard.overrides is None else sorted(set(given) - set(self.guard.overrides))
        if pinned:
            raise Refused(f"this run overrides {pinned[0]}, which is not among the overrides that the site allows.")

    def admit(self, message: Message, app: str) -> AdmittedRequest:
        """Check and return the request of a message; nothing is charged yet. Raises `Refused` with a reason for the server."""
        trains = message.metadata.message_type == "train" and message.has_content()
        try:
            require(trains, "the site answers training only.")
            request, layout, w = read_request(message)
            helper_key = pinned_key(request, self.guard, {})
        except InputError as reason:
            raise Refused(str(reason)) from None
        except Exception as error:
            _log.warning("a request could not be read", exc_info=error)
            raise Refused("the request can't be read.") from None
        self.guard.admit(request, run=str(message.metadata.run_id), app=app, charge=False)
        return AdmittedRequest(message, request, layout, w, app, helper_key)

    def answer(self, admitted: AdmittedRequest, trained: Message | None) -> Message:
        """The reply to a request: a charged report, or a fixed error."""
        request = admitted.request
        try:
            try:
                update, ballots = self._read(admitted, trained)
            except Exception as error:
                _log.error("what the app returned is not an update: %s", error)
                if not self.guard.answer_failures:
                    return refusal(admitted.message, NO_REPORT)
                update, ballots = torch.zeros(request.shape(len(admitted.w))), read_ballots(None, request)
            # Charged before the report exists.
            self.guard.admit(request, run=admitted.run, app=admitted.app)
            node = admitted.message.metadata.dst_node_id
            content = reply_content(update, request, ballots, admitted.run, node, admitted.helper_key)
            return Message(content, reply_to=admitted.message)
        except Refused as reason:
            _log.warning("this site sent no report: %s", reason)
        except Exception as error:
            _log.error("the report could not be made", exc_info=error)
        return refusal(admitted.message, NO_REPORT)

    def _read(self, admitted: AdmittedRequest, trained: Message | None) -> tuple[Tensor, Tensor | None]:
        """The update [1, d], or a row per client, and the votes. Nothing else that the app returned is read."""
        request, layout, w = admitted.request, admitted.layout, admitted.w
        if trained is None or not trained.has_content():
            raise InputError("it returned no content.")
        records = trained.content.array_records
        if ROWS in records or request.purpose != UPDATE:
            rows = torch.from_numpy(_values(records[ROWS]["rows"], request.shape(len(w))))
        else:
            arrays = records[MODEL]
            require(tuple(arrays) == layout.names, "its arrays are not those of the model.")
            parts = [
                _values(array, tuple(shape)).reshape(-1)
                for array, shape in zip(arrays.values(), layout.shapes, strict=True)
            ]
            rows = (torch.from_numpy(np.concatenate(parts)) - w)[None]
        return rows, read_ballots(trained, request)


def _values(array: Array, shape: tuple[int, ...]) -> np.ndarray:
    """The array as float32. Values that are not finite stay: `clip_and_randomize` sets such rows to zero."""
    require(array.dtype in _FLOATS, "one of its arrays is not of floating-point numbers.")
    return strict_array(array, array.dtype, shape, of_app=True).astype(np.float32)


@dataclass
class MessageGate:
    """The gate between Flower's SuperNode and the network.

    An app may take `app_timeout` seconds, or until the request expires; the SuperLink is polled every `poll` seconds.
    """

    site: Site
    app_timeout: float = 3600.0
    poll: float = 1.0
    _pull: Callable[..., int | None] = field(default=flower._pull_and_store_message, repr=False)
    _push: Callable[..., None] = field(default=flower._push_messages, repr=False)
    _admitted: AdmittedRequest | None = None
    _answer: Message | None = None
    _deadline: float = 0.0

    def install(self) -> None:
        """Replace Flower's two functions; raises `InputError` if one of them has changed."""
        check_flower("node", flower, {"_pull_and_store_message": PULL, "_push_messages": PUSH})
        flower._pull_and_store_message, flower._push_messages = self.pull, self.push

    def pull(self, **given: Any) -> int:
        """Wait for a message; return its run id once it is stored for the app or already has its answer."""
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
            state = given["state"]
            run = state.get_run(run_id) or given["get_run"](run_id)
            fab = state.get_fab(run.fab_hash) or given["get_fab"](run.fab_hash, run_id)
            self.site.check_app(fab.content, run.fab_hash)
            self.site.check_overrides(run.override_config)
            if run.primary_task_type == TaskType.AGENT_APP or run.run_id != run_id:
                raise Refused("the site answers training only.")
            ids = [node.object_id for node in iterate_object_tree(tree)]
            contents = pull_objects(ids, pull_object_fn=lambda key: given["pull_object"](run_id, key))
            message = _inflate(tree.object_id, dict(contents))
            message.metadata.__dict__["_message_id"] = tree.object_id
            if _identity(message) != _identity(header):
                raise Refused("the message is not the one that was announced.")
            # A helper of two-party aggregation answers without an app.
            self._answer = helper_reply(message, str(run_id), {}) if message.has_content() else None
            if self._answer is not None:
                return int(run_id)
            admitted = self.site.admit(message, run.fab_hash)
        except RunNotRunningException:
            return None
        except Exception as error:
            reason = error if isinstance(error, Refused) else Refused("the message can't be read.")
            if reason is not error:
                _log.error("a message could not be fetched", exc_info=error)
            _log.warning("this site refused a request: %s", reason)
            self._answer = refusal(header, reason.shown)
            return int(run_id)
        known = {
            "receive": lambda: (header, tree),
            "get_run": lambda _: run,
            "get_fab": lambda *_: fab,
            "pull_object": lambda _, key: contents[key],
            "trusted_entities": None,
        }
        try:
            stored = self._pull(**{**given, **known})
        except ValueError as error:  # a run may override a setting that the app lacks, which must not end the node
            _log.error("this site refused a request: it could not be stored for the app", exc_info=error)
            self._answer = refusal(header, "the message can't be read.")
            return int(run_id)
        if stored is not None:
            self._admitted = admitted
            # Counted from now, not from the time of sending, because the server's clock may differ.
            self._deadline = time.monotonic() + min(self.app_timeout, float(header.metadata.ttl))
        return stored

    def push(self, state: Any, object_store: ObjectStore, send: Any, push_object: Any) -> None:
        """Send the site's own answer to the last message, and nothing else."""
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
            # The duration of the app stays on the site.
            return send(message, tree, 0.0) if message is answer else _refuse_to_send()

        def pushing(run_id: int, session: str, key: str, content: bytes) -> None:
            push_object(run_id, session, key, content) if key in objects else _refuse_to_send()

        # The part of the node's state that Flower's function may use: this one message, and the deletion of messages.
        outbox = SimpleNamespace(
            get_messages_legacy=lambda is_reply: [answer],
            get_message_processing_duration=lambda message_id: 0.0,
            delete_messages=state.delete_messages,
        )
        self._push(outbox, store, sending, pushing)

    def _returned(self, state: Any, store: ObjectStore, asked: Metadata) -> Message | None:
        """The app's reply to this message; None if it can't be read or is late. All other replies are deleted."""
        while time.monotonic() < self._deadline:
            replies = list(state.get_messages_legacy(is_reply=True))
            mine = [reply for reply in replies if reply.metadata.reply_to_message_id == asked.message_id]
            try:
                if mine:
                    return _complete_message(store, mine[0].metadata.message_id, self._deadline)
            except Exception as error:
                _log.error("what the app returned can't be read", exc_info=error)
                return None
            finally:
                for reply in replies:
                    state.delete_messages(message_ids=[reply.metadata.message_id])
                    store.delete(reply.metadata.message_id)
            time.sleep(0.1)
        _log.error("the app did not answer before the request or the site's app_timeout ended")
        # Revokes the tokens, so that a late process can neither return nor fetch anything.
        for task in state.get_tasks(run_ids=[asked.run_id]):
            state.finish_task(task.task_id, sub_status=SubStatus.STOPPED, details="The request has ended.")
        return None


def _complete_message(store: ObjectStore, key: str, deadline: float) -> Message:
    """Wait until the app has sent all parts of a message, or until the deadline, and build the message."""
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


def _identity(message: Message) -> tuple[int, str, str]:
    about = message.metadata
    return about.run_id, about.message_type, about.message_id


def _refuse_to_send() -> Any:
    raise RuntimeError("Flower tried to send what the site did not make.")


def run_node(options: Sequence[str], gate: MessageGate) -> None:
    """Run Flower's SuperNode with these options behind the gate, until it is stopped."""
    gate.install()
    check_flower("node", command, {"_parse_supernode_lifespan_config": "", "_start_supernode_http_api": SERVE})
    parse = command._parse_supernode_lifespan_config

    def parsed() -> Any:
        config = parse()
        config.node_config = {**config.node_config, ENFORCED: secrets.token_hex(16)}
        return config

    command._parse_supernode_lifespan_config = parsed
    command._start_supernode_http_api = serve_runtime
    # Replaces `flower-superexec`, which Flower starts with `--isolation subprocess`.
    ours = [sys.executable, "-m", "dpfedexp", "superexec"]
    flower.subprocess = SimpleNamespace(Popen=lambda words: subprocess.Popen([*ours, *words[1:]]))
    sys.argv = ["flower-supernode", *options]
    command.flower_supernode()


class RuntimeGate:
    """Allow only the app's user to use Flower's Runtime API, by which an app gets the model and returns its result.

    The app's user is the node's own user or, with `other_user` (`--isolation process`), a user or another machine's address that
    has sent the SuperExec's secret: a token alone is not enough. Users of the same machine are identified only on Linux.
    """

    def __init__(self, application: Any, other_user: bool) -> None:
        self._application, self._apart = application, other_user
        self._admitted = set() if other_user else {f"user {os.geteuid()}", "user"}
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
            await answer_nothing(scope, send)
            return

        async def send_and_note(event: MutableMapping[str, Any]) -> None:
            # Status 200 means that Flower has checked the secret.
            if asks and event["type"] == "http.response.start" and event["status"] == 200:
                self._admitted.add(str(who))
            await send(event)

        await self._application(scope, receive, send_and_note)

    def _refusal(self, who: str | None, asks: bool) -> str:
        """The reason for refusing a request; "" for a request to pass on."""
        if who is None or (who not in self._admitted and not asks):
            return f"a process of {who or 'an unknown user'} requested the app's task and was refused."
        number = who.removeprefix("user ")
        dumpers = core_dumpers(int(number)) if asks and number.isdecimal() else []
        if dumpers:
            return (
                f"the app's process {dumpers[0]} may dump core, with the data in it, and gets no task: start it with "
                "`dpfedexp superexec`, which forbids that, instead of `flower-superexec`."
            )
        return ""


def serve_runtime(config: Any, state_factory: Any) -> tuple[uvicorn.Server, threading.Thread]:
    """Replace Flower's `_start_supernode_http_api`: start the same server in a thread, with `RuntimeGate` in front."""
    flower: Any = import_module("flwr.supernode.main")
    whole = flower.create_app(state_factory=state_factory, superexec_auth_secret=config.superexec_auth_secret)
    server = uvicorn.Server(
        uvicorn.Config(
            RuntimeGate(whole, other_user=config.isolation == "process"),
            host=config.host,
            port=config.port,
            access_log=False,
            ssl_certfile=config.runtime_ssl_certfile,
            ssl_keyfile=config.runtime_ssl_keyfile,
            # Clients can forge the proxy headers that name an address.
            proxy_headers=False,
        )
    )
    thread = threading.Thread(target=server.run, name="supernode-runtime-http-api")
    thread.start()
    while thread.is_alive() and not server.started:
        time.sleep(0.1)
    if not server.started:
        raise RuntimeError("the Runtime API failed to start; see the log.")
    return server, thread
