"""A charge is on disk before `charge` returns, in the order that a crash needs; an unknown version is not guessed at."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from events_by_hand import central

from dpfedexp.accounting import Budget, Ledger
from dpfedexp.accounting import ledger as chain
from dpfedexp.accounting.charges import privunit as exact_event
from dpfedexp.accounting.ledger import FORMAT, VERSION
from dpfedexp.errors import InputError, LedgerError


@pytest.fixture
def calls(monkeypatch):
    """What reaches the operating system, in order: (what, file)."""
    made: list[tuple[str, str]] = []
    write, sync, replace = os.write, os.fsync, os.replace

    def name_of(descriptor):
        return os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))

    def spied_write(descriptor, data):
        made.append(("write", name_of(descriptor)))
        return write(descriptor, data)

    def spied_sync(descriptor):
        made.append(("sync", name_of(descriptor)))
        return sync(descriptor)

    def spied_replace(source, target):
        made.append(("replace", os.path.basename(target)))
        return replace(source, target)

    monkeypatch.setattr(os, "write", spied_write)
    monkeypatch.setattr(os, "fsync", spied_sync)
    monkeypatch.setattr(os, "replace", spied_replace)
    return made


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="names of descriptors come from /proc")


@needs_proc
def test_a_charge_is_written_then_synced_then_counted_by_the_head_before_it_returns(tmp_path, calls):
    with Ledger.create(tmp_path / "ledger.jsonl") as ledger:
        for number in (1, 2):
            calls.clear()
            ledger.charge(number, central(5.0))
            assert calls == [
                ("write", "ledger.jsonl"),
                ("sync", "ledger.jsonl"),
                ("sync", "ledger.jsonl.head.tmp"),
                ("replace", "ledger.jsonl.head"),
                ("sync", tmp_path.name),
            ]


@needs_proc
def test_a_new_ledger_is_synced_before_it_appears_and_its_folder_after(tmp_path, calls, monkeypatch):
    link = os.link
    monkeypatch.setattr(
        os, "link", lambda source, target: (calls.append(("link", os.path.basename(target))), link(source, target))[1]
    )
    Ledger.create(tmp_path / "ledger.jsonl").close()
    partial = f"ledger.jsonl.{os.getpid()}.tmp"
    head = [("sync", "ledger.jsonl.head.tmp"), ("replace", "ledger.jsonl.head"), ("sync", tmp_path.name)]
    assert calls == [("sync", partial), ("link", "ledger.jsonl"), ("sync", tmp_path.name), *head]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.jsonl", "ledger.jsonl.head"]


@needs_proc
def test_a_torn_line_is_cut_off_and_the_cut_synced_before_anything_follows(tmp_path, calls):
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path) as ledger:
        ledger.charge(1, central(5.0))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq":2')
    calls.clear()
    Ledger.open(path, repair=True).close()
    assert calls[0] == ("sync", "ledger.jsonl")
    assert path.read_bytes() == whole


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("version", [VERSION + 1, 0, -1, str(VERSION), None, [VERSION]])
def test_a_ledger_of_an_unknown_version_is_refused_however_it_is_opened(version, read_only, tmp_path):
    path = tmp_path / "ledger.jsonl"
    chain.ChainWriter.create(path, {"format": FORMAT, "version": version, "config": ""}).close()
    with pytest.raises(LedgerError, match="version"):
        Ledger.open(path, read_only=read_only)


def test_a_file_of_another_format_is_refused(tmp_path):
    path = tmp_path / "ledger.jsonl"
    chain.ChainWriter.create(path, {"format": "other", "version": VERSION, "config": ""}).close()
    with pytest.raises(LedgerError, match=FORMAT):
        Ledger.open(path)


@pytest.mark.parametrize("field", ["p", "cap", "epsilon2", "k", "nominal"])
@pytest.mark.parametrize("value", ["much", None, [1]])
def test_a_number_of_a_charge_that_is_none_is_found_when_the_ledger_is_opened(field, value, tmp_path):
    path = tmp_path / "ledger.jsonl"
    with Ledger.create(path) as ledger:
        ledger.charge(1, replace(exact_event(1.0, 1.0, 1.0), **{field: value}))
    with pytest.raises(LedgerError, match="line 2: not a charge"):
        Ledger.open(path)


def test_a_budget_is_above_nothing_and_its_delta_may_be_zero_but_not_one():
    assert Budget(1e-300, 0.0).delta == 0.0
    for epsilon, delta in ((0.0, 0.1), (-1.0, 0.1), (1.0, 1.0), (1.0, -1e-9)):
        with pytest.raises(InputError, match="budget"):
            Budget(epsilon, delta)
