"""An enforcing site with two aggregators: its own process puts the mask on, and a helper answers without any app."""

from __future__ import annotations

import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from dpfedexp.core.noise.lattice import expand, from_words
from dpfedexp.flower.messages import REPORT, REQUEST
from dpfedexp.flower.node.mod import privatize
from dpfedexp.flower.two_party.node import HELPER
from dpfedexp.mechanisms.aggregation import Round, unmasked
from dpfedexp.mechanisms.text import encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

from ..mechanisms.parties import charges, helper_file, public_key, round_of, rows, sent
from .test_site import Node, bundle, honest  # noqa: F401  `bundle` is a fixture

MECHANISM = TwoPartyGaussian(0.5, 3.0)
NONCE = f"{1:032d}"


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "state"))
    (tmp_path / "helper").mkdir()
    return helper_file(tmp_path / "helper", total=1e3, per_round=1e2)


def site(folder, bundle, **limits):  # noqa: F811
    folder.mkdir()
    return Node(folder, bundle, mechanisms=("two-party",), **limits)


def stored(node: Node) -> int:
    """Messages that wait for an app."""
    return len(node.state.get_messages_legacy(is_reply=False))


def test_a_helper_answers_in_its_own_process_and_starts_no_app(tmp_path, bundle, file, monkeypatch):  # noqa: F811
    monkeypatch.setenv("DPFEDEXP_HELPER", str(file.path))
    node = site(tmp_path / "site", bundle)

    def asked(**fields) -> Message:
        node.sent, node.pushed = [], {}
        node.ask(records={HELPER: ConfigRecord(fields)})
        node.push()
        return node.answer()

    assert asked(asks="who").content.config_records[HELPER]["key"] == public_key(file)
    round_, units = round_of(run=str(node.run.run_id), nonce=NONCE), rows()
    messages = sent(round_, public_key(file), units)
    fields = {
        "asks": "sum",
        "round": 1,
        "nonce": NONCE,
        "columns": round_.columns,
        "clip": round_.clip,
        "mechanism": round_.mechanism,
        "nodes": list(messages),
        "seeds": [message.sealed for message in messages.values()],
    }
    assert asked(**{**fields, "nodes": fields["nodes"][:1], "seeds": fields["seeds"][:1]}).has_error()
    assert charges(file) == 0
    answer = asked(**fields).content.array_records[REPORT]["vector"].numpy()
    assert (charges(file), stored(node)) == (1, 0)
    total = from_words(unmasked([message.words for message in messages.values()], answer))
    assert float((total - units.sum(0)).abs().max()) < 64 * 2.0**21
    assert asked(**fields).has_error()


def test_what_leaves_the_site_is_the_clipped_row_under_a_mask_that_the_helper_can_take_off(tmp_path, bundle, file):  # noqa: F811
    node = site(tmp_path / "site", bundle, helper_key=public_key(file))
    node.reply(Message(RecordDict(honest()), reply_to=node.ask(MECHANISM)))
    node.push()
    content = node.answer().content
    words = content.array_records[REPORT]["vector"].numpy()
    binding = Round(str(node.run.run_id), 1, NONCE, len(words), 0.5, encode(MECHANISM))
    seed = file.helper().key.open(content.config_records[REQUEST]["seed"], binding.info(7))
    assert seed is not None
    found = from_words(unmasked([words], expand(seed, len(words))))
    update = torch.from_numpy(honest()["arrays"]["w"].numpy()) - 1.0
    assert torch.equal(found, MECHANISM.units(privatize(update, MECHANISM))[0])


def test_a_site_that_pins_no_helper_starts_no_app_and_pays_nothing(tmp_path, bundle, monkeypatch):  # noqa: F811
    monkeypatch.delenv("DPFEDEXP_HELPER_KEY", raising=False)
    node = site(tmp_path / "site", bundle)
    node.ask(MECHANISM)
    node.push()
    assert "helper_key" in node.answer().error.reason
    assert (node.charges, stored(node)) == (0, 0)


def test_a_site_that_is_no_helper_says_so_without_an_app(tmp_path, bundle, monkeypatch):  # noqa: F811
    monkeypatch.delenv("DPFEDEXP_HELPER", raising=False)
    node = site(tmp_path / "site", bundle)
    node.ask(records={HELPER: ConfigRecord({"asks": "who"})})
    node.push()
    assert "no helper" in node.answer().error.reason
    assert stored(node) == 0
