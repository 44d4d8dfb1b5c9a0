"""The ledger survives crashes, shows every change, and stops a run before its budget is gone."""

import json
import os
import re
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from events_by_hand import central, local

from dpfedexp.accounting import Budget, Ledger, NonPrivateEvent, compose, gdp
from dpfedexp.accounting import ledger as chain
from dpfedexp.accounting.events import GaussianEvent, Sampling, to_json, votes_only
from dpfedexp.accounting.events import privunit as exact_event
from dpfedexp.accounting.ledger import FORMAT, VERSION, head_path
from dpfedexp.errors import BudgetExceeded, InputError, LedgerError

EVENT, REPORT = central(5.0), exact_event(1.0, 1.0, 1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.jsonl"


@pytest.fixture
def calls(monkeypatch):
    """What reaches the operating system, in order: (what, file)."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("names of descriptors come from /proc")
    made: list[tuple[str, str]] = []

    def spy(name, real):
        def call(first, *more):
            file = os.readlink(f"/proc/self/fd/{first}") if isinstance(first, int) else more[0]
            made.append((name.removeprefix("f"), os.path.basename(file)))
            return real(first, *more)

        monkeypatch.setattr(os, name, call)

    for name in ("write", "fsync", "replace", "link"):
        spy(name, getattr(os, name))
    return made


def heads(path: Path, rounds: int = 3) -> list[bytes]:
    """Writes a ledger; its head after each charge, the first one of the empty ledger."""
    with Ledger.create(path, config="abc", delta=1e-5) as ledger:
        found = [head_path(path).read_bytes()]
        for t in range(rounds):
            assert ledger.charge(t, EVENT)
            found.append(head_path(path).read_bytes())
    return found


def written(path: Path, rounds: int = 3) -> bytes:
    heads(path, rounds)
    return path.read_bytes()


def test_what_was_charged_is_read_back(path):
    sampled = central(1.0, rate=0.1, adjacency="add-remove")
    joint = GaussianEvent("central", "replace-one", EVENT.queries, Sampling("fixed", 0.1), joint_mu=0.3)
    events = [EVENT, local(0.7), REPORT, NonPrivateEvent(), sampled, joint]
    with Ledger.create(path) as ledger:
        for t, event in enumerate(events):
            ledger.charge(t, event)
    assert [entry.event for entry in Ledger.open(path, read_only=True).entries] == events


def test_guarantee_is_the_composition_of_the_charges(path):
    written(path, 50)
    ledger = Ledger.open(path)
    assert ledger.charges() == [(EVENT, 50)]
    assert ledger.guarantee(1e-5) == compose([(EVENT, 50)], 1e-5)
    # Any other accountant needs nothing of this library but the meaning of the fields: μ² adds.
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    mu = gdp.compose(q["sensitivity"] / q["noise"] for line in lines[1:] for q in line["event"]["queries"])
    assert gdp.epsilon(mu, 1e-5) == pytest.approx(15.4562, abs=5e-5)


def test_a_flip_of_any_bit_of_the_file_is_detected_and_named(path):
    content = written(path, 2)
    for i in range(len(content)):
        damaged = bytearray(content)
        damaged[i] ^= 1 << (i % 8)
        path.write_bytes(damaged)
        line = content.count(b"\n", 0, i) + 1
        with pytest.raises(LedgerError, match="missing|incomplete" if i == len(content) - 1 else f"line {line}"):
            Ledger.open(path)


def test_a_removed_line_is_detected_wherever_it_was(path):
    lines = written(path, 4).splitlines(keepends=True)
    for i in range(1, len(lines)):
        path.write_bytes(b"".join(lines[:i] + lines[i + 1 :]))
        with pytest.raises(LedgerError, match="missing" if i == len(lines) - 1 else f"line {i + 1}"):
            Ledger.open(path)
    path.write_bytes(lines[0])
    with pytest.raises(LedgerError, match="holds 0 charges but 4 were made"):
        Ledger.open(path)


@pytest.mark.parametrize("cut", [1, 17, 200])
def test_a_torn_last_line_is_ignored_by_readers_and_dropped_by_the_next_run(path, cut, calls):
    _, head, _ = heads(path, 2)
    kept = b"".join(path.read_bytes().splitlines(keepends=True)[:2])
    # What a kill in the middle of the second write leaves: part of a line, and the head of the first charge.
    path.write_bytes(path.read_bytes()[: len(kept) + cut])
    head_path(path).write_bytes(head)
    assert len(Ledger.open(path, read_only=True)) == 1
    calls.clear()
    with Ledger.open(path) as ledger:
        assert calls[0] == ("sync", "ledger.jsonl"), "the cut is on disk before anything follows"
        assert path.read_bytes() == kept
        assert [entry.round for entry in ledger.entries] == [0]
        assert ledger.charge(1, EVENT)
    assert len(Ledger.open(path)) == 2


def test_a_charge_belongs_to_a_run_a_round_and_its_noise_and_only_a_replay_is_free(path):
    mine = {"run": "a", "noise": "seed 0"}
    with Ledger.create(path) as ledger:
        assert ledger.charge(0, EVENT, **mine)
        assert ledger.charge(1, EVENT, **mine)
    with Ledger.open(path) as ledger:
        assert not ledger.charge(0, EVENT, **mine)
        assert not ledger.charge(1, EVENT, **mine)
        assert len(ledger) == 2
        assert ledger.charge(1, EVENT)
        assert ledger.charge(1, EVENT)
        assert ledger.charge(1, EVENT, run="b", noise="seed 0")
        assert ledger.charge(1, EVENT, run="a", noise="seed 1")
        assert ledger.charges() == [(EVENT, 6)]
        with pytest.raises(LedgerError, match="round 0 is already charged with a different event"):
            ledger.charge(0, central(4.0), **mine)


def test_a_ledger_holds_its_own_marks_and_no_others(path, tmp_path):
    with Ledger.create(path) as ledger:
        marks = [ledger.mark()]
        for t in range(3):
            ledger.charge(t, EVENT)
            marks.append(ledger.mark())
    again = Ledger.open(path, read_only=True)
    assert all(again.holds(mark) for mark in marks)
    other = tmp_path / "other.jsonl"
    with Ledger.create(other) as elsewhere:
        for t in range(4):
            elsewhere.charge(t, EVENT)
        assert not any(elsewhere.holds(mark) for mark in marks[1:])
    shorter = tmp_path / "shorter.jsonl"
    shorter.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:3]))
    head_path(shorter).write_bytes(json.dumps({"count": 2, "hash": marks[2].hash}).encode())
    assert [Ledger.open(shorter, read_only=True).holds(mark) for mark in marks] == [True, True, True, False]


@pytest.fixture
def witness():
    """A witness with all the marks that it has seen."""
    witness = Mock(seen=[])
    witness.move.side_effect = lambda ledger: witness.seen.append(ledger.mark())
    return witness


def test_a_witness_knows_the_mark_before_the_charge_returns_and_again_at_a_replay(path, witness):
    with Ledger.create(path) as ledger:
        ledger.witnesses.append(witness)
        ledger.charge(1, EVENT, run="a", noise="seed 0")
        ledger.charge(2, EVENT, run="a")
        ledger.charge(1, EVENT, run="a", noise="seed 0")
        assert [mark.count for mark in witness.seen] == [1, 2, 2]
        assert all(ledger.holds(mark) for mark in witness.seen)
        witness.move.side_effect = OSError(28, "No space left on device")
        with pytest.raises(OSError, match="No space"):
            ledger.charge(3, EVENT, run="a")
        witness.check.side_effect = LedgerError("another copy went on")
        for charge in (lambda: ledger.charge(4, EVENT), ledger.check_newest):
            with pytest.raises(LedgerError, match="another copy went on"):
                charge()
    witness.close.assert_called_once_with()
    assert [entry.round for entry in Ledger.open(path, read_only=True).entries] == [1, 2, 3], "not what was refused"


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_seal_holds_until_the_run_is_charged_again_and_witnesses_know_it(path, in_memory, witness):
    with Ledger.in_memory() if in_memory else Ledger.create(path) as ledger:
        ledger.witnesses.append(witness)
        ledger.charge(1, EVENT, run="a")
        before = ledger.mark()
        for _ in range(2):
            ledger.seal("a", model="m")
        assert (ledger.sealed("a"), ledger.sealed("b")) == ({"model": "m"}, None)
        assert witness.seen == [before, ledger.mark()], "the same seal again is none"
        assert ledger.holds(before)
        assert in_memory or ledger.mark() != before
        again = ledger if in_memory else Ledger.open(path, read_only=True)
        assert (again.sealed("a"), again.mark()) == ({"model": "m"}, ledger.mark())
        ledger.charge(1, EVENT, run="b")
        assert ledger.sealed("a") == {"model": "m"}
        ledger.charge(2, EVENT, run="a")
        assert ledger.sealed("a") is None
    for late in (lambda: ledger.charge(3, EVENT), lambda: ledger.seal("b", model="m")):
        with pytest.raises(LedgerError, match="opened for reading"):
            late()


def test_budget_stops_before_the_round_that_would_exceed_it():
    ledger, budget = Ledger.in_memory(), Budget(15.4562, 1e-5)
    for t in range(50):
        ledger.check(budget, EVENT, round=t, noise="seed 0")
        ledger.charge(t, EVENT, noise="seed 0")
    with pytest.raises(BudgetExceeded, match=r"15\.4562 is spent, and round 50 would make it 15\.65"):
        ledger.check(budget, EVENT, round=50, noise="seed 0")
    ledger.check(budget, EVENT, round=49, noise="seed 0")
    assert len(ledger) == 50


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (EVENT, r"; 0\.0000 is spent, and round 7 would"),
        (votes_only((("evaluation", 3.0),)), "and the evaluation after round 7 would"),
        (votes_only((("first clip", 3.0),)), "and the vote on the first clip would"),
    ],
)
def test_the_budgets_sentence_names_what_was_not_started(event, sentence):
    with pytest.raises(BudgetExceeded, match=sentence):
        Ledger.in_memory().check(Budget(1e-3, 1e-5), event, round=7)


def test_what_a_ledger_refuses_is_a_sentence(path):
    written(path)
    reading = Ledger.open(path, read_only=True)
    for wrong, words in (
        (lambda: Ledger.create(path), "already exists"),
        (lambda: Ledger.open(path.with_name("none.jsonl")), "does not exist"),
        (lambda: reading.charge(9, EVENT), "opened for reading"),
        (lambda: Ledger.in_memory().charge(-1, EVENT), "round is -1"),
    ):
        with pytest.raises((LedgerError, InputError), match=words):
            wrong()
    assert path.read_bytes().count(b"\n") == 4
    with Ledger.open(path), pytest.raises(LedgerError, match="in use by another run"):
        Ledger.open(path)


def test_asking_whether_a_run_is_alive_keeps_none_from_beginning(path):
    """`read_status` takes the lock to see whether anybody has it."""
    fcntl = pytest.importorskip("fcntl")
    written(path)
    with open(path, "rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_EX)
        moment = threading.Timer(0.02, fcntl.flock, (asking, fcntl.LOCK_UN))
        moment.start()
        with Ledger.open(path) as ledger:
            assert len(ledger) == 3
        moment.join()


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"\x00" * 1000, b"x" * 200_000, b"[" * 60_000 + b"\n", b'{"format": "other"}\n', b"\xff\xfe\n"],
)
def test_hostile_files_are_refused_in_bounded_memory(path, content):
    path.write_bytes(content)
    with pytest.raises(LedgerError):
        Ledger.open(path)


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize("behind", [0, 1, 2, 3])
def test_a_head_may_be_one_record_behind_and_no_more(behind, read_only, path):
    found = heads(path)
    head_path(path).write_bytes(found[3 - behind])
    if behind <= 1:
        with Ledger.open(path, read_only=read_only) as ledger:
            assert len(ledger) == 3
        assert json.loads(head_path(path).read_text())["count"] == (3 - behind if read_only else 3)
    else:
        with pytest.raises(LedgerError, match="do not belong together"):
            Ledger.open(path, read_only=read_only)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        *((c, "was changed") for c in ('{"count":-1,"hash":"a"}', '{"count":"3","hash":"a"}', '{"count":3,"hash":3}')),
        *((c, "was changed") for c in ('{"count":3}', "[]", "x")),
        *((json.dumps({"count": n, "hash": "0" * 64}), "do not belong together") for n in (0, 2, 3)),
    ],
)
def test_a_head_that_is_not_the_ledgers_is_refused(content, words, path):
    heads(path)
    head_path(path).write_text(content)
    with pytest.raises(LedgerError, match=words):
        Ledger.open(path)


def test_only_a_ledger_without_charges_opens_without_its_head(path):
    Ledger.create(path).close()
    head_path(path).unlink()
    with Ledger.open(path) as ledger:
        assert head_path(path).exists()
        ledger.charge(1, central(5.0))
    head_path(path).unlink()
    with pytest.raises(LedgerError, match="is missing"):
        Ledger.open(path)


def test_a_line_may_be_as_long_as_the_limit_and_not_a_byte_longer(path):
    room = chain._MAX_LINE - len(chain._hashed_line({"text": ""}, chain._GENESIS)[0])
    path.write_bytes(chain._hashed_line({"text": "a" * room}, chain._GENESIS)[0])
    assert len(chain.read_chain(path).header["text"]) == room
    path.write_bytes(chain._hashed_line({"text": "a" * (room + 1)}, chain._GENESIS)[0])
    with pytest.raises(LedgerError, match="line 1: longer"):
        chain.read_chain(path)


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


def test_a_new_ledger_is_synced_before_it_appears_and_its_folder_after(tmp_path, calls):
    Ledger.create(tmp_path / "ledger.jsonl").close()
    partial = f"ledger.jsonl.{os.getpid()}.tmp"
    head = [("sync", "ledger.jsonl.head.tmp"), ("replace", "ledger.jsonl.head"), ("sync", tmp_path.name)]
    assert calls == [("sync", partial), ("link", "ledger.jsonl"), ("sync", tmp_path.name), *head]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ledger.jsonl", "ledger.jsonl.head"]


@pytest.mark.parametrize("read_only", [True, False])
@pytest.mark.parametrize(
    ("header", "words"),
    [
        *(({"format": FORMAT, "version": v}, re.escape(f"version {v!r}; this")) for v in (3, 1, "2", None)),
        ({"format": "other", "version": VERSION}, FORMAT),
    ],
)
def test_a_ledger_of_another_version_or_format_is_refused_however_it_is_opened(header, words, read_only, path):
    chain.ChainWriter.create(path, header).close()
    with pytest.raises(LedgerError, match=words):
        Ledger.open(path, read_only=read_only)


NUMBERS = {"p": "x", "cap": None, "epsilon2": [1], "k": None, "nominal": "x"}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"event": to_json(REPORT) | {name: value}} for name, value in NUMBERS.items()),
        *({"round": "1"}, {"round": True}, {"run": 3}, {"noise": None}),
    ],
)
def test_a_charge_of_no_release_or_without_its_numbers_is_found_when_the_ledger_is_opened(wrong, path):
    with Ledger.create(path) as ledger:
        ledger._append({"run": "", "round": 1, "noise": "a", "event": to_json(EVENT)} | wrong)
    for _ in range(2):  # a refused file is left unlocked
        with pytest.raises(LedgerError, match="line 2: not a charge"):
            Ledger.open(path)


def test_a_budget_is_above_nothing_and_its_delta_may_be_zero_but_not_one():
    assert Budget(1e-300, 0.0).delta == 0.0
    for epsilon, delta in ((0.0, 0.1), (-1.0, 0.1), (1.0, 1.0), (1.0, -1e-9)):
        with pytest.raises(InputError, match="budget"):
            Budget(epsilon, delta)
