"""An enforcing site against hostile apps and servers, through Flower's own SuperNode functions and stores.

The app of these tests does what a real one can through the SuperNode's Runtime API: store any reply with any objects. What Flower
is told to send is caught where the network would be.
"""

import hashlib
import inspect
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.nodestate import NodeStateFactory

from dpfedexp.accounting import Ledger, Sampling
from dpfedexp.core.noise import expand, from_words
from dpfedexp.core.sums import Vote
from dpfedexp.errors import InputError
from dpfedexp.flower import site as seam_module
from dpfedexp.flower.access import VERSIONS
from dpfedexp.flower.app import new_app
from dpfedexp.flower.client import clip_and_randomize
from dpfedexp.flower.guard import Guard
from dpfedexp.flower.messages import HELPER, REFUSAL, REPORT, REQUEST, NodeRequest, read_sums
from dpfedexp.flower.site import NO_REPORT, PULL, PUSH, MessageGate, Site
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian
from dpfedexp.mechanisms.aggregation import RoundBinding, unmask_sum
from dpfedexp.mechanisms.serialization import encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

from ..mechanisms.parties import charges, helper_file, public_key, round_of, rows, sent
from .loopback import parts_of, with_id

CENTRAL, LOCAL = CentralGaussian(0.5, 3.0).secure(), LocalGaussian(0.5, 3.0).secure()
SECRET = np.arange(1000, 1004, dtype=np.float32)
MASKED = TwoPartyGaussian(0.5, 3.0)
WORD = "patient 47110815"
MODEL = {"w": np.ones(4, dtype=np.float32)}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> bytes:
    place = tmp_path_factory.mktemp("apps") / "app"
    new_app(place)
    return build_fab_from_disk(place)


class Node:
    """One SuperNode's state and stores, with the site in front; `sent` is what reached the network."""

    def __init__(self, folder, bundle: bytes, **limits) -> None:
        self.bundle, self.fab_hash = bundle, hashlib.sha256(bundle).hexdigest()
        settings = {"max_epsilon_per_round": 100.0, "max_epsilon_total": 1000.0, "delta": 1e-5, "max_clip": 1.0}
        settings |= {"mechanisms": ("central-gaussian", "local-gaussian"), "apps": (self.fab_hash,)}
        folder.mkdir(exist_ok=True)
        self.guard = Guard(folder / "guard.toml", **{**settings, **limits})
        self.guard.path.touch()
        self.store = ObjectStoreFactory()
        self.state = NodeStateFactory(self.store).state()
        self.state.set_node_id(7)
        self.gate = MessageGate(Site(self.guard), app_timeout=2.0, poll=0.01)
        self.run = replace(Run.create_empty(5), fab_hash=self.fab_hash, series_id=9)
        self.sent, self.pushed, self.durations = [], {}, []

    def ask(
        self, mechanism=CENTRAL, kind="train", round=1, records=None, ttl=3600.0, run=None, bundle=None, **request
    ) -> Message:
        """The server's message, taken in by Flower's own function; `run` are changes of the run, and `bundle` is another app."""
        self.run = replace(self.run, **(run or {}))
        given = NodeRequest(round, f"{round:032d}", mechanism, Sampling(), **request)
        content = {"arrays": arrays(MODEL), "config": ConfigRecord(), REQUEST: given.to_record()}
        message = Message(RecordDict(content if records is None else records), 7, kind, group_id=str(round), ttl=ttl)
        message.metadata.__dict__["_run_id"] = self.run.run_id
        objects = parts_of(with_id(message))
        header = Message(RecordDict(), reply_to=None, dst_node_id=7, message_type=kind)
        header.metadata.__dict__.update(message.metadata.__dict__)
        self.gate.pull(
            state=self.state,
            object_store=self.store.store(),
            node_config={},
            receive=lambda: (header, get_object_tree(message)),
            get_run=lambda _: self.run,
            get_fab=lambda *_: Fab(self.fab_hash, bundle or self.bundle, {}),
            pull_object=lambda _, key: objects[key],
            confirm_message_received=lambda *_: None,
            trusted_entities=None,
        )
        return message

    def reply(self, reply: Message, leave_out: int = 0) -> None:
        """As the Runtime API does for an app: the message, then its objects."""
        session = self.state.start_session(self.run.run_id)
        self.state.store_message_and_object_tree(with_id(reply), get_object_tree(reply), session)
        for key, value in list(parts_of(reply).items())[leave_out:]:
            self.state.store_object(self.run.run_id, session, key, value)

    def push(self) -> None:
        def send(message, tree, duration):
            self.sent.append(message)
            self.durations.append(duration)
            return {node.object_id for node in seam_module.iterate_object_tree(tree)}, "session"

        self.gate.push(self.state, self.store.store(), send, lambda _, __, key, data: self.pushed.update({key: data}))

    def exchange(self, make, mechanism=CENTRAL, **options) -> Message:
        """Asks, lets the app answer with what `make` makes of the question, and returns the question."""
        message = self.ask(mechanism)
        self.reply(make(message), **options)
        self.push()
        return message

    @property
    def everything(self) -> bytes:
        """All bytes that left."""
        return b"".join(self.pushed.values()) + repr([message.metadata.__dict__ for message in self.sent]).encode()

    @property
    def charges(self) -> int:
        return len(Ledger.open(self.guard.ledger, read_only=True)) if self.guard.ledger.exists() else 0

    def answer(self) -> Message:
        """The one message that left, as its receiver reads it."""
        assert len(self.sent) == 1
        return inflate_object_from_contents(self.sent[0].metadata.message_id, dict(self.pushed))


@pytest.fixture
def node(tmp_path, bundle) -> Node:
    return Node(tmp_path, bundle)


def arrays(values: dict) -> ArrayRecord:
    return ArrayRecord({name: Array(value) for name, value in values.items()})


def honest() -> dict:
    return {"arrays": arrays({"w": MODEL["w"] + np.float32([0.3, 0.0, 0.0, 0.4])})}


def lying() -> Array:
    made = Array(SECRET)
    made.shape = (2**40,)
    return made


def renamed(message: Message) -> Message:
    reply = Message(RecordDict(honest()), reply_to=message)
    reply.metadata.__dict__["_group_id"] = WORD
    reply.metadata.__dict__["_message_type"] = "query." + "patient"
    return reply


def elsewhere(message: Message) -> Message:
    reply = Message(RecordDict({"arrays": arrays({"w": SECRET})}), reply_to=message)
    reply.metadata.__dict__["_reply_to_message_id"] = "f" * 64
    return reply


def forged(message: Message) -> RecordDict:
    fields = {"round": 1, "nonce": f"{1:032d}", "note": WORD}
    return RecordDict({REPORT: arrays({"vector": SECRET}), REQUEST: ConfigRecord(fields)})


def hostile(content):
    return lambda m: Message(RecordDict(content if isinstance(content, dict) else content(m)), reply_to=m)


REPORTED = {
    "rows in another array record": hostile({**honest(), "rows": arrays({"x": SECRET})}),
    "rows in metrics": hostile({**honest(), "m": MetricRecord({"rows": SECRET.tolist()})}),
    "rows in votes not requested": hostile({**honest(), "dpfedexp.votes": MetricRecord({"loss": SECRET.tolist()})}),
    "text in a config record": hostile({**honest(), "c": ConfigRecord({"who": WORD})}),
    "a report of its own beside the parameters": hostile(lambda m: {**honest(), **forged(m)}),
    "huge parameters": hostile({"arrays": arrays({"w": SECRET * np.float32(1e30)})}),
    "NaN": hostile({"arrays": arrays({"w": SECRET * np.float32("nan")})}),
    "text in the reply's metadata, and another type": renamed,
    "rows as doubles": hostile({"arrays": arrays({"w": SECRET.astype(np.float64)})}),
}
REFUSED = {
    "a report of its own": hostile(forged),
    "text as an error": lambda m: Message(Error(77, WORD), reply_to=m),
    "nothing": hostile({}),
    "another shape": hostile({"arrays": arrays({"w": np.concatenate([SECRET, SECRET])})}),
    "another name": hostile({"arrays": arrays({WORD: SECRET})}),
    "one array more": hostile({"arrays": arrays({**MODEL, "x": SECRET})}),
    "whole numbers": hostile({"arrays": arrays({"w": SECRET.astype(np.int64)})}),
    "an array that claims to be enormous": hostile({"arrays": ArrayRecord({"w": lying()})}),
    "a reply to another message": elsewhere,
    "a reply whose parts never come": hostile(honest()),
}


@pytest.mark.parametrize("kind", REPORTED)
@pytest.mark.parametrize("mechanism", [CENTRAL, LOCAL], ids=["central", "local"])
def test_what_leaves_is_one_charged_report_whatever_else_the_app_returned(kind, mechanism, node):
    request = NodeRequest.from_message(node.exchange(REPORTED[kind], mechanism))
    answer = node.answer()
    assert set(answer.content) == {REPORT, REQUEST}
    assert set(answer.content[REQUEST]) <= {"round", "nonce", "level", "votes"}
    sums = read_sums(answer, request, mechanism.width(4))
    assert sums.count == 1
    if mechanism is CENTRAL:
        assert float(sums.vector.norm()) <= mechanism.clip * (1 + 1e-6)
    assert (answer.metadata.group_id, answer.metadata.message_type) == ("1", "train")
    assert WORD.encode() not in node.everything
    assert SECRET.tobytes() not in node.everything
    assert (node.charges, node.durations) == (1, [0.0])


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_no_update_becomes_the_one_error_and_is_not_charged(kind, node):
    node.gate.app_timeout = 0.3
    node.exchange(REFUSED[kind], leave_out=int(kind == "a reply whose parts never come"))
    answer = node.answer()
    assert (answer.error.code, answer.error.reason) == (6, REFUSAL + NO_REPORT)
    assert WORD.encode() not in node.everything
    assert node.charges == 0


@pytest.mark.parametrize("votes", [(), (Vote("improved", 0.0, 1.0, noise=20.0),)])
def test_a_failure_is_a_charged_report_of_zero_where_the_site_says_so(votes, tmp_path, bundle):
    """With an automatic rate, which asks for a vote, it was an error, which said that the app had failed."""
    node = Node(tmp_path, bundle, answer_failures=True)
    message = node.exchange(
        lambda m: Message(Error(77, WORD), reply_to=m), CentralGaussian(0.5, 3.0, votes=votes).secure()
    )
    sums = read_sums(node.answer(), NodeRequest.from_message(message), 4)
    assert float(sums.vector.norm()) == float(sums.votes.abs().sum()) == 0
    assert node.charges == 1


@pytest.mark.parametrize(
    ("app_timeout", "ttl", "taken"),
    [(0.2, 3600.0, False), (0.2, 3600.0, True), (3600.0, 0.3, True)],
    ids=["not taken", "app_timeout", "request"],
)
def test_an_app_that_never_answers_gets_the_error_and_can_return_nothing_later(app_timeout, ttl, taken, node):
    """What was shown: a task that another process had taken kept the site silent for an hour, through all later rounds."""
    node.gate.app_timeout = app_timeout
    first = node.ask(ttl=ttl)
    (task,) = node.state.get_tasks()
    token = node.state.claim_task(task.task_id) if taken else ""
    assert not taken or node.state.activate_task(task_id=task.task_id), "a process has it, and says nothing"
    waiting = threading.Thread(target=node.push, daemon=True)
    waiting.start()
    waiting.join(120)
    assert not waiting.is_alive()
    assert node.answer().error.reason == REFUSAL + NO_REPORT
    assert node.state.get_task_by_token(token) is None, "its token opens nothing any more"
    assert node.state.claim_task(task.task_id) is None, "nobody can take it now"
    node.reply(hostile({"arrays": arrays({"w": SECRET})})(first))
    node.gate.app_timeout = 2.0
    node.sent.clear()
    node.pushed.clear()
    node.reply(hostile(honest())(node.ask(round=2)))
    node.push()
    assert node.answer().content[REQUEST]["round"] == 2
    assert node.charges == 1
    assert list(node.state.get_messages_legacy(is_reply=True)) == []


def test_of_many_replies_one_report_leaves(node):
    message = node.ask()
    for shift in range(3):
        node.reply(hostile({"arrays": arrays({"w": SECRET + shift})})(message))
    node.push()
    assert set(node.answer().content) == {REPORT, REQUEST}
    node.push()
    assert (len(node.sent), node.charges) == (1, 1)


def test_an_honest_update_arrives_as_it_was_computed_and_the_ledger_says_when_for_which_run_and_app(node):
    """What the app keeps in its state stays on the node."""
    kept = RecordDict({"kept": ConfigRecord({"who": WORD})})
    node.state.set_run_series_context(9, Context(5, 7, {"dpfedexp-guard": "/tmp/mine"}, kept, {}))
    message = node.exchange(hostile(honest()))
    vector = read_sums(node.answer(), NodeRequest.from_message(message), 4).vector
    assert vector.tolist() == pytest.approx([0.3, 0.0, 0.0, 0.4], abs=1e-6)
    assert WORD.encode() not in node.everything
    line = node.guard.ledger.read_text().splitlines()[1]
    assert all(part in line for part in (f'"app":"{node.fab_hash}"', '"run":"5"', '"time":"20'))


FOLDER_ALONE = {"overrides": ("federation.folder",)}
SETTINGS = {"federation.folder": "/x", "federation.rounds": 10**9}
INCOMING = {
    "an app that is not on the list": ({"apps": ("0" * 64,)}, {}, "this app is not on the site's list"),
    "a mechanism that the guard forbids": ({"mechanisms": ("privunit",)}, {}, "'central-gaussian' is not allowed"),
    "a clip above the guard's": ({"max_clip": 0.1}, {}, "clip 0.5 is above"),
    "a budget that is spent": ({"max_epsilon_total": 0.01}, {}, "max_epsilon_total"),
    "another kind of message": ({}, {"kind": "query"}, "the site answers training only"),
    "no request": ({}, {"records": {"arrays": arrays(MODEL)}}, "no dpfedexp request"),
    "masks without a helper's key": ({"mechanisms": ("two-party",)}, {"mechanism": MASKED}, "helper_key is missing"),
    "an app that is not the one it claims to be": ({}, {"bundle": b"another"}, "this app is not on the site's list"),
    "an agent": ({}, {"run": {"primary_task_type": TaskType.AGENT_APP}}, "the site answers training only"),
    "a setting that is pinned": (FOLDER_ALONE, {"run": {"override_config": SETTINGS}}, "overrides federation.rounds"),
    # Flower raises where it joins such a setting to the app's own, and the node's process ended.
    "a setting that the app lacks": ({}, {"run": {"override_config": {"no.such": 1}}}, "the message can't be read"),
}


@pytest.mark.parametrize("kind", INCOMING)
def test_a_refused_request_starts_no_app(kind, tmp_path, bundle, caplog):
    limits, request, reason = INCOMING[kind]
    node = Node(tmp_path, bundle, **limits)
    node.ask(**request)
    assert not node.state.get_tasks()
    assert not node.state.get_messages_legacy(is_reply=False)
    node.push()
    assert reason in node.answer().error.reason
    assert "this site refused a request: " in caplog.text
    assert node.charges == 0


def test_flower_is_not_where_the_seam_expects_it_names_the_function(monkeypatch, node):
    monkeypatch.setattr(seam_module.flower, "_push_messages", lambda state, outbox: None)
    with pytest.raises(InputError, match=r"start_client_internal\._push_messages.*install flwr==1\.42\.0"):
        node.gate.install()


SOURCES = {
    "_pull_and_store_message": "eaf5d0e36dc34e4cf46a490511d077ac55cc8edbbcdbe938c1f6dbcb758628be",
    "_push_messages": "00bb86faffdec114db87e7f716af2acd901d12284e44f51f5c2a84704db05f64",
    "start_client_internal": "9e89a6eb68fbec6821e817cd2c09f7894fc7b0f5725c2365b19a7122307f11f3",
}


@pytest.mark.parametrize("name", SOURCES)
def test_flowers_functions_at_the_seam_are_the_ones_that_were_read(name):
    """They are private to Flower. If one changed: read it again, see that every message still passes it, then change the hash."""
    import flwr

    assert flwr.__version__ in VERSIONS
    function = getattr(seam_module.import_module("flwr.supernode.start_client_internal"), name)
    assert hashlib.sha256(inspect.getsource(function).encode()).hexdigest() == SOURCES[name], f"{name} has changed"
    if name != "start_client_internal":
        assert list(inspect.signature(function).parameters) == (PULL if "pull" in name else PUSH).split()


NONCE = f"{1:032d}"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "state"))
    (tmp_path / "helper").mkdir()
    return helper_file(tmp_path / "helper", total=1e3, per_round=1e2)


def test_a_helper_answers_in_its_own_process_and_starts_no_app(tmp_path, bundle, file, monkeypatch):
    node = Node(tmp_path / "site", bundle)

    def asked(**fields) -> Message:
        node.sent, node.pushed = [], {}
        node.ask(records={HELPER: ConfigRecord(fields)})
        node.push()
        return node.answer()

    assert "this node is no helper" in asked(asks="who").error.reason
    monkeypatch.setenv("DPFEDEXP_HELPER", str(file.path))
    assert asked(asks="who").content.config_records[HELPER]["key"] == public_key(file)
    round_, units = round_of(run=str(node.run.run_id), nonce=NONCE), rows()
    messages = sent(round_, public_key(file), units)
    fields = {"asks": "sum", "number": 1, "nonce": NONCE, "columns": round_.columns, "clip": round_.clip}
    fields |= {"mechanism": round_.mechanism, "candidate": 0, "nodes": list(messages)}
    fields["seeds"] = [message.sealed for message in messages.values()]
    assert asked(**{**fields, "nodes": fields["nodes"][:1], "seeds": fields["seeds"][:1]}).has_error()
    assert "has no candidate" in asked(**{**fields, "candidate": "0"}).error.reason
    assert charges(file) == 0
    answer = asked(**fields).content.array_records[REPORT]["vector"].numpy()
    assert charges(file) == 1
    assert node.state.get_messages_legacy(is_reply=False) == [], "no message waits for an app"
    total = from_words(unmask_sum([message.words for message in messages.values()], answer))
    assert float((total - units.sum(0)).abs().max()) < 64 * 2.0**21
    assert asked(**fields).has_error()


def test_what_leaves_the_site_is_the_clipped_row_under_a_mask_that_the_helper_can_take_off(tmp_path, bundle, file):
    node = Node(tmp_path / "site", bundle, mechanisms=("two-party",), helper_key=public_key(file))
    node.exchange(hostile(honest()), MASKED)
    content = node.answer().content
    words = content.array_records[REPORT]["vector"].numpy()
    binding = RoundBinding(str(node.run.run_id), 1, NONCE, len(words), 0.5, encode(MASKED))
    seed = file.helper().key.open(content.config_records[REQUEST]["seed"], binding.info(7))
    assert seed is not None
    found = from_words(unmask_sum([words], expand(seed, len(words))))
    update = torch.from_numpy(honest()["arrays"]["w"].numpy()) - 1.0
    assert torch.equal(found, MASKED.units(clip_and_randomize(update, MASKED))[0])


@pytest.mark.parametrize(
    ("limits", "settings"), [({}, SETTINGS), (FOLDER_ALONE, {"federation.folder": "/x"})], ids=["all", "listed"]
)
def test_a_run_that_overrides_what_the_site_allows_is_answered(limits, settings, tmp_path, bundle):
    node = Node(tmp_path, bundle, **limits)
    node.run = replace(node.run, override_config=settings)
    node.exchange(hostile(honest()))
    assert not node.answer().has_error()
    assert node.charges == 1
