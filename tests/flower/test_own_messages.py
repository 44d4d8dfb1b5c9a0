"""A listed node that turns against the others: with its own key it tries their messages, on Flower's own state and handlers."""

from __future__ import annotations

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
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.federation import NoOpFederationManager

from dpfedexp.errors import InputError
from dpfedexp.flower import superlink as own_messages
from dpfedexp.flower.access import node_id
from dpfedexp.flower.superlink import EXPECTED, OwnMessages, handlers, memory_factories

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
            message = Message(content(7.0), node, "train", ttl=600.0)
        message.metadata.__dict__["_message_id"] = message.object_id
        session = self.state.start_session(self.run)
        stored, missing = self.state.store_message_and_object_tree(message, get_object_tree(message), session)
        assert stored
        for key in missing:
            value = get_all_nested_objects(message)[key].deflate()
            assert self.state.store_object(self.run, session, key, value)
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

    def reply(self, node: int, records: RecordDict, *, to: int | None = None) -> Message:
        """An answer to what a node was asked, in that node's name."""
        message = Message(records, reply_to=self.asked[node if to is None else to])
        message.metadata.__dict__["_message_id"] = message.object_id
        return message

    def push(self, node: int, message: Message):
        request = PushMessagesRequest(node=Node(node_id=node))
        request.messages_list.append(message_to_proto(message))
        request.message_object_trees.append(get_object_tree(message))
        return handlers.push_messages(request=request, state=self.state)

    def upload(self, node: int, session: str, key: str, value: bytes) -> bool:
        request = PushObjectRequest(node=Node(node_id=node), run_id=self.run, session_id=session)
        request.object_id, request.object_content = key, value
        return handlers.push_object(request=request, state=self.state).stored

    def answer(self, node: int, records: RecordDict) -> Message:
        """What an honest node does; True for every object that it uploads."""
        message = self.reply(node, records)
        response, parts = self.push(node, message), get_all_nested_objects(message)
        assert set(response.objects_to_push) == set(parts), "all of it is asked for, whoever has sent the same"
        assert all(self.upload(node, response.session_id, key, parts[key].deflate()) for key in parts)
        return message


def content(value: float) -> RecordDict:
    return RecordDict({"arrays": ArrayRecord({"vector": Array(np.full(3, value, dtype="<f4"))})})


@pytest.fixture
def link(monkeypatch):
    for name in EXPECTED:
        monkeypatch.setattr(handlers, name, getattr(handlers, name))  # put back at the end
    OwnMessages().install()
    return Link()


def test_an_honest_exchange_passes(link):
    for node in (VICTIM, HOSTILE):
        (message,) = link.pull(node)
        assert message.metadata.message_id == link.asked[node].metadata.message_id
        for key in get_all_nested_objects(link.asked[node]):
            assert link.object_of(node, key).object_available
        link.confirm(node, message.metadata.message_id)
        sent = link.answer(node, content(float(node == VICTIM)))
        assert link.state.get_message_res({link.asked[node].metadata.message_id}, link.run)[0].metadata.message_id
        assert all(link.store.get(key) for key in get_all_nested_objects(sent))


def test_nobody_answers_in_anothers_name(link):
    link.pull(HOSTILE)
    forged = link.reply(VICTIM, content(9.0))
    with pytest.raises(HTTPException) as refused:
        link.push(HOSTILE, forged)
    assert refused.value.status_code == 403
    link.answer(VICTIM, content(1.0))


def test_a_guess_of_anothers_update_is_not_confirmed(link):
    """The victim has no data, so its update is all zeros; whoever knows that can compute the names of all its objects."""

    def all_that_the_hostile_node_sees(link: Link) -> list:
        link.pull(HOSTILE)
        parts = {key: part.deflate() for key, part in get_all_nested_objects(content(0.0)["arrays"]).items()}
        fetched = [link.object_of(HOSTILE, key).SerializeToString() for key in parts]
        response = link.push(HOSTILE, link.reply(HOSTILE, content(0.0)))
        without_session = [link.upload(HOSTILE, "", key, part) for key, part in parts.items()]
        other_content = [link.upload(HOSTILE, response.session_id, key, b"other") for key in parts]
        own_content = [link.upload(HOSTILE, response.session_id, key, part) for key, part in parts.items()]
        asked_for = set(parts) <= set(response.objects_to_push)
        return [fetched, asked_for, without_session, other_content, own_content]

    before = all_that_the_hostile_node_sees(Link())
    link.answer(VICTIM, content(0.0))
    assert all_that_the_hostile_node_sees(link) == before


def test_anothers_message_is_neither_fetched_nor_deleted(link):
    link.pull(HOSTILE)
    theirs = link.asked[VICTIM].metadata.message_id
    assert not link.object_of(HOSTILE, theirs).object_found
    link.confirm(HOSTILE, theirs)
    assert len(link.pull(VICTIM)) == 1
    assert link.object_of(VICTIM, theirs).object_available


@pytest.mark.parametrize("name", EXPECTED)
def test_a_function_of_flowers_that_moved_is_named(name, monkeypatch):
    monkeypatch.setattr(own_messages.handlers, name, lambda request: None)
    with pytest.raises(InputError, match=name):
        OwnMessages().install()
