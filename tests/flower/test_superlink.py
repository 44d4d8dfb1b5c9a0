"""The SuperLink that is closed by default: who a node is, what it can reach, and what a listed node can't do to the others."""

import asyncio
from unittest.mock import AsyncMock

import numpy as np
import pytest
from fastapi import HTTPException
from flwr.app import Array, ArrayRecord, Message, RecordDict
from flwr.common.constant import NOOP_FLWR_AID, SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.router import router as fleet_router

from dpfedexp.errors import InputError
from dpfedexp.flower import superlink as own_messages
from dpfedexp.flower.access import node_id, parse_address, read_keys, read_nodes
from dpfedexp.flower.local_deployment import make_node_key
from dpfedexp.flower.superlink import EXPECTED, FLEET, FilteredApp, NodeMessages, handlers, memory_factories, serve

from .loopback import parts_of, with_id


@pytest.fixture
def keys(tmp_path):
    """A list of three nodes."""
    public = [make_node_key(tmp_path, f"node{i}")[1].read_text() for i in range(3)]
    path = tmp_path / "nodes.pub"
    path.write_text("# hospitals\n\n" + "".join(public))
    return path


def test_ids_follow_from_keys_over_restarts_and_are_those_of_the_list(keys):
    states = [memory_factories(NoOpFederationManager(), read_keys(keys))[1].state() for _ in range(2)]
    for state in states:
        assert sorted(state.nodes) == list(read_nodes(keys))
        for key in read_keys(keys):
            assert state.get_node_id_by_public_key(key) == node_id(key)
            assert state.activate_node(node_id(key), 30.0)
        assert sorted(info.node_id for info in state.nodes.values()) == sorted(state.nodes)
        assert state.owner_to_node_ids[NOOP_FLWR_AID] == set(state.nodes)
        with pytest.raises(ValueError, match="already in use"):
            state.create_node(NOOP_FLWR_AID, "none", read_keys(keys)[0], 30.0)
    assert len(set(read_nodes(keys))) == 3


def test_two_keys_never_share_an_id(keys, monkeypatch):
    monkeypatch.setattr(own_messages.access, "node_id", lambda key: 7)
    with pytest.raises(ValueError, match="another key has this node's id"):
        memory_factories(NoOpFederationManager(), read_keys(keys))


def test_a_list_of_nodes_that_is_none_is_a_sentence(keys, tmp_path):
    first = keys.read_text().splitlines()[2]
    for text, reason in (
        ("", "names no node"),
        (f"{first}\n{first}\n", "names a node twice"),
        ("ssh-rsa AAAA\n", "line 1: not a public key of a node"),
        (f"{first}\nhospital\n", "line 2: not a public key of a node"),
    ):
        keys.write_text(text)
        with pytest.raises(InputError, match=reason):
            read_nodes(keys)
    with pytest.raises(InputError, match="can't be read"):
        read_nodes(tmp_path / "missing")


def ask(application, path, method="POST", kind="http"):
    """The status that a request gets; what reached the application gets 200."""
    send = AsyncMock()
    asyncio.run(application({"type": kind, "method": method, "path": path}, AsyncMock(), send))
    first = send.await_args_list[0].args[0]
    return first.get("status", first.get("code"))


async def everything(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_the_nodes_end_serves_flowers_fleet_paths_and_nothing_else():
    outer = FilteredApp(everything, own_messages.is_fleet)
    assert {route.path for route in fleet_router.routes} == FLEET
    for path in FLEET:
        assert ask(outer, path) == 200
        assert ask(outer, path, method="GET") == 404
        assert ask(outer, path + "/") == 404
    closed = ("/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/acquire-task", "/openapi.json")
    for path in (*closed, "/v1/fleet/../control/start-run", "//v1/control/start-run", "/health", "/docs", "/"):
        assert ask(outer, path) == 404
    assert ask(outer, "/v1/fleet/pull-messages", kind="websocket") == 1000


@pytest.mark.parametrize(
    ("who", "own"),
    [("user 1000", True), ("user 0", True), ("user", True), ("user 1001", False), ("192.0.2.7", False), (None, False)],
)
def test_the_other_port_serves_root_and_the_superlinks_own_user(who, own, monkeypatch):
    ends = ("127.0.0.1", 1), ("127.0.0.1", 2)
    monkeypatch.setattr(own_messages.access, "peer", lambda *given: who if given == ends else pytest.fail("other ends"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert own_messages.is_own_user({"client": ends[0], "server": ends[1]}) is own


def test_what_would_open_it_is_refused(keys):
    for options, reason in (
        (["--host", "0.0.0.0"], "--host is not an option"),
        (["--database=x"], "the state is in memory"),
        (["--datab", "x"], "the state is in memory"),
        (["--ho=0.0.0.0"], "--ho is not an option"),
    ):
        with pytest.raises(InputError, match=reason):
            serve(options, fleet="0.0.0.0:9092", control_port=1, nodes=keys)
    for wrong in ("9092", "example.org:9092", "1.2.3.4:", "1.2.3.4:99999"):
        with pytest.raises(InputError, match="it must be an IP address and a port"):
            parse_address(wrong, "fleet")
    assert parse_address("[::1]:5", "fleet") == ("::1", 5)


def test_another_version_of_flower_is_refused_before_anything_is_served(keys, monkeypatch):
    """The SuperLink stands on private functions as the node does."""
    given = {"fleet": "127.0.0.1:9092", "control_port": 1, "nodes": keys}
    monkeypatch.setattr("flwr.__version__", "1.43.0")
    with pytest.raises(InputError, match=r"for flwr 1\.41\.0 or 1\.42\.0, and this is 1\.43\.0; install flwr==1"):
        serve([], **given)
    monkeypatch.undo()
    monkeypatch.setattr("flwr.superlink.main.create_app", lambda settings: None)
    with pytest.raises(InputError, match=r"whose flwr\.superlink\.main\.create_app is another one"):
        serve([], **given)


VICTIM, HOSTILE = node_id(b"victim"), node_id(b"hostile")


class Link:
    """A SuperLink with two nodes in one run that asks each of them the same."""

    def __init__(self) -> None:
        self.state = memory_factories(NoOpFederationManager(), [b"victim", b"hostile"])[1].state()
        self.store = self.state.object_store
        self.run = self.state.create_run("", "", "", {}, NOOP_FEDERATION_ID, None, NOOP_FLWR_AID, TaskType.SERVER_APP)
        task = self.state.run_ids[self.run].run.primary_task_id
        self.state.claim_task(task)
        assert self.state.activate_task(task)
        self.asked = {node: self.ask(node, task) for node in (VICTIM, HOSTILE)}

    def ask(self, node: int, task: int) -> Message:
        assert self.state.activate_node(node, 30.0)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(TaskIdentity, "_run_id", self.run)
            patched.setattr(TaskIdentity, "_node_id", SUPERLINK_NODE_ID)
            patched.setattr(TaskIdentity, "_task_id", task)
            message = with_id(Message(content(7.0), node, "train", ttl=600.0))
        session = self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(message, get_object_tree(message), session)
        assert stored
        assert all(self.state.store_object(self.run, session, key, parts_of(message)[key]) for key in missing)
        return message

    def pull(self, node: int) -> list:
        request = PullMessagesRequest(node=Node(node_id=node))
        return handlers.pull_messages(request=request, state=self.state, store=self.store).messages_list

    def object_of(self, node: int, key: str):
        request = PullObjectRequest(node=Node(node_id=node), run_id=self.run, object_id=key)
        return handlers.pull_object(request=request, state=self.state)

    def confirm(self, node: int, key: str) -> None:
        request = ConfirmMessageReceivedRequest(node=Node(node_id=node), run_id=self.run, message_object_id=key)
        handlers.confirm_message_received(request=request, state=self.state, store=self.store)

    def reply(self, node: int, records: RecordDict) -> Message:
        """An answer to what a node was asked, in that node's name."""
        return with_id(Message(records, reply_to=self.asked[node]))

    def push(self, node: int, message: Message):
        request = PushMessagesRequest(
            node=Node(node_id=node),
            messages_list=[message_to_proto(message)],
            message_object_trees=[get_object_tree(message)],
        )
        return handlers.push_messages(request=request, state=self.state)

    def upload(self, node: int, session: str, key: str, value: bytes) -> bool:
        given = {"run_id": self.run, "session_id": session, "object_id": key, "object_content": value}
        request = PushObjectRequest(node=Node(node_id=node), **given)
        return handlers.push_object(request=request, state=self.state).stored

    def answer(self, node: int, records: RecordDict) -> Message:
        """What an honest node does; True for every object that it uploads."""
        message = self.reply(node, records)
        response, parts = self.push(node, message), parts_of(message)
        assert set(response.objects_to_push) == set(parts), "all of it is requested, even if another node sent the same"
        assert all(self.upload(node, response.session_id, key, part) for key, part in parts.items())
        return message


def content(value: float) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord({"vector": Array(np.full(3, value, dtype="<f4"))})})


@pytest.fixture
def link(monkeypatch):
    for name in EXPECTED:
        monkeypatch.setattr(handlers, name, getattr(handlers, name))  # put back at the end
    NodeMessages().install()
    return Link()


def test_an_honest_exchange_passes(link):
    for node in (VICTIM, HOSTILE):
        (message,) = link.pull(node)
        assert message.metadata.message_id == link.asked[node].metadata.message_id
        for key in parts_of(link.asked[node]):
            assert link.object_of(node, key).object_available
        link.confirm(node, message.metadata.message_id)
        sent = link.answer(node, content(float(node == VICTIM)))
        assert link.state.get_message_res({link.asked[node].metadata.message_id}, link.run)[0].metadata.message_id
        assert all(link.store.get(key) for key in parts_of(sent))


def test_no_node_answers_in_anothers_name(link):
    link.pull(HOSTILE)
    forged = link.reply(VICTIM, content(9.0))
    with pytest.raises(HTTPException, match="403"):
        link.push(HOSTILE, forged)
    link.answer(VICTIM, content(1.0))


def test_a_guess_of_anothers_update_is_not_confirmed_and_an_object_has_the_name_of_its_content(link):
    """The victim has no data, so its update is all zeros; an attacker who knows that can compute the names of all its objects."""

    def all_that_the_hostile_node_sees(link: Link) -> list:
        link.pull(HOSTILE)
        parts = parts_of(content(0.0)["arrays"])
        fetched = [link.object_of(HOSTILE, key).SerializeToString() for key in parts]
        response = link.push(HOSTILE, link.reply(HOSTILE, content(0.0)))
        without_session = [link.upload(HOSTILE, "", key, part) for key, part in parts.items()]
        other_content = [link.upload(HOSTILE, response.session_id, key, b"other") for key in parts]
        own_content = [link.upload(HOSTILE, response.session_id, key, part) for key, part in parts.items()]
        asked_for = set(parts) <= set(response.objects_to_push)
        return [fetched, asked_for, without_session, other_content, own_content]

    before = all_that_the_hostile_node_sees(Link())
    many = len(before[0])
    assert before == [[b""] * many, True, [False] * many, [False] * many, [True] * many]
    link.answer(VICTIM, content(0.0))
    assert all_that_the_hostile_node_sees(link) == before


def test_anothers_message_is_neither_fetched_nor_deleted(link):
    link.pull(HOSTILE)
    theirs = link.asked[VICTIM].metadata.message_id
    assert not link.object_of(HOSTILE, theirs).ListFields(), "neither found nor available"
    link.confirm(HOSTILE, theirs)
    assert len(link.pull(VICTIM)) == 1
    assert link.object_of(VICTIM, theirs).object_available


@pytest.mark.parametrize("name", EXPECTED)
def test_a_function_of_flowers_that_moved_is_named(name, monkeypatch):
    monkeypatch.setattr(own_messages.handlers, name, lambda request: None)
    with pytest.raises(InputError, match=name):
        NodeMessages().install()
