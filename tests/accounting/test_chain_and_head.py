"""A ledger and its head have to belong together: same hash at the head's count, and at most one record more."""

from __future__ import annotations

import json

import pytest
from events_by_hand import central

from dpfedexp.accounting import Ledger
from dpfedexp.accounting import ledger as chain
from dpfedexp.accounting.ledger import head_path
from dpfedexp.errors import LedgerError


def heads(path, rounds):
    """The head after each charge, the first one of the empty ledger."""
    found = []
    with Ledger.create(path) as ledger:
        found.append(head_path(path).read_bytes())
        for number in range(rounds):
            ledger.charge(number, central(5.0))
            found.append(head_path(path).read_bytes())
    return found


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("behind", [0, 1, 2, 3])
def test_a_head_may_be_one_record_behind_and_no_more(behind, read_only, tmp_path):
    path = tmp_path / "ledger.jsonl"
    found = heads(path, 3)
    head_path(path).write_bytes(found[3 - behind])
    if behind <= 1:
        with Ledger.open(path, read_only=read_only) as ledger:
            assert len(ledger) == 3
    else:
        with pytest.raises(LedgerError, match="do not belong together"):
            Ledger.open(path, read_only=read_only)


@pytest.mark.parametrize("count", [0, 2, 3])
def test_a_head_with_another_hash_is_refused_whatever_it_counts(count, tmp_path):
    path = tmp_path / "ledger.jsonl"
    heads(path, 3)
    head_path(path).write_text(json.dumps({"count": count, "hash": "0" * 64}))
    with pytest.raises(LedgerError, match="do not belong together"):
        Ledger.open(path)


@pytest.mark.parametrize(
    "content",
    ['{"count":-1,"hash":"a"}', '{"count":"3","hash":"a"}', '{"count":3,"hash":3}', '{"count":3}', "[]", "", "x"],
)
def test_a_head_that_is_not_a_head_is_refused(content, tmp_path):
    path = tmp_path / "ledger.jsonl"
    heads(path, 3)
    head_path(path).write_text(content)
    with pytest.raises(LedgerError, match="was changed"):
        Ledger.open(path)


def test_a_head_that_counts_more_than_there_is_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    found = heads(path, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    head_path(path).write_bytes(found[3])
    with pytest.raises(LedgerError, match="holds 2 charges but 3 were made"):
        Ledger.open(path)


def test_only_a_ledger_without_charges_opens_without_its_head(tmp_path):
    path = tmp_path / "ledger.jsonl"
    Ledger.create(path).close()
    head_path(path).unlink()
    with Ledger.open(path) as ledger:
        assert head_path(path).exists()
        ledger.charge(1, central(5.0))
    head_path(path).unlink()
    with pytest.raises(LedgerError, match="is missing"):
        Ledger.open(path)


def test_a_line_may_be_as_long_as_the_limit_and_not_a_byte_longer(tmp_path):
    path = tmp_path / "long.jsonl"
    empty = len(chain._seal({"text": ""}, chain._GENESIS)[0])
    for extra, fits in ((0, True), (1, False)):
        path.write_bytes(chain._seal({"text": "a" * (chain._MAX_LINE - empty + extra)}, chain._GENESIS)[0])
        if fits:
            assert len(chain.read_chain(path).header["text"]) == chain._MAX_LINE - empty
        else:
            with pytest.raises(LedgerError, match="line 1: longer"):
                chain.read_chain(path)


def test_a_file_system_without_hard_links_still_refuses_to_replace_a_ledger(tmp_path, monkeypatch):
    def no_links(source, target):
        raise PermissionError("no hard links here")

    monkeypatch.setattr(chain.os, "link", no_links)
    path = tmp_path / "ledger.jsonl"
    heads(path, 2)
    kept = path.read_bytes()
    with pytest.raises(LedgerError, match="already exists"):
        Ledger.create(path)
    assert path.read_bytes() == kept
    with Ledger.open(path) as ledger:
        assert len(ledger) == 2


def test_a_refused_file_is_left_unlocked(tmp_path):
    path = tmp_path / "ledger.jsonl"
    heads(path, 2)
    whole = path.read_bytes()
    path.write_bytes(whole + b"{")
    for _ in range(2):
        with pytest.raises(LedgerError, match="incomplete line"):
            Ledger.open(path)
    with Ledger.open(path, repair=True) as ledger:
        assert len(ledger) == 2
        with pytest.raises(LedgerError, match="in use"):
            Ledger.open(path)
    assert path.read_bytes() == whole
