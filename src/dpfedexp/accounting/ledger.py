"""The ledger: the charges of a run, each written to disk before its release.

The file has one JSON object per line: a header, then charges, terms and seals. A line ends with the SHA-256 of the line before's
and its own text. The file `<name>.head` holds the number of records and the last hash, so that removed last lines are detected too.

A charge is written and synced, then the head is replaced atomically and synced, then `charge` returns. If the process is killed,
the file has at most one record more than its head, or ends in a torn line: neither was acknowledged, and the ledger opens again.
"""

import hashlib
import json
import os
import secrets
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from dpfedexp.accounting.compose import Guarantee, compose
from dpfedexp.accounting.events import EVALUATION, Event, GaussianEvent, PrivUnitEvent, from_json, to_json
from dpfedexp.errors import BudgetExceeded, InputError, LedgerError, checked, require
from dpfedexp.files import create_file, replace_bytes, try_lock

FORMAT = "dpfedexp-ledger"
VERSION = 2
_MAX_LINE = 64 * 1024
_MAX_BYTES = 2**30
_GENESIS = "0" * 64


@checked
@dataclass(frozen=True)
class Budget:
    """The largest total ε, at δ, that a run may spend."""

    epsilon: float
    delta: float

    def __post_init__(self) -> None:
        require(self.epsilon > 0.0, f"budget epsilon is {self.epsilon}; it must be above 0.")
        require(0.0 <= self.delta < 1.0, f"budget delta is {self.delta}; it must be at least 0 and below 1.")


@checked
@dataclass(frozen=True)
class LedgerEntry:
    """One charge: the event of round `round` of the run `run`, with the noise key `noise`.

    These fields determine the release, so computing it again with the same noise reveals nothing new. A release that differs in
    any field is charged again.
    """

    round: int
    event: Event
    run: str = ""
    noise: str = ""

    @property
    def release(self) -> tuple[str, int, str]:
        return self.run, self.round, self.noise


@dataclass(frozen=True)
class LedgerMark:
    """A position in a ledger: the number of charges, and the hash of the last line ("" in memory)."""

    count: int
    hash: str


class LedgerWitness(Protocol):
    """Keeps the position of a ledger outside its folder, so that older and second copies are refused.

    `check` raises `LedgerError` unless the ledger is the newest copy; `move` checks the ledger and stores its mark on disk. No
    charge follows after `close`.
    """

    def check(self, ledger: "Ledger") -> None: ...

    def move(self, ledger: "Ledger") -> None: ...

    def close(self) -> None: ...


@checked
class Ledger:
    """The charges of a run, or of several runs over the same clients, whose costs add up.

    Use `create`, `open` or `in_memory` to make a ledger. `charge` returns only after the charge is on disk and all `witnesses` have
    stored the new mark.
    """

    def __init__(
        self,
        header: dict[str, Any],
        entries: list[LedgerEntry],
        writer: "ChainWriter | None",
        content: "Chain | None" = None,
    ) -> None:
        self.header = header
        self._entries = entries
        self.lock = threading.Lock()
        self._after: list[list[str]] = [[]]
        """For each number of charges, the hashes of the last charge and of the seals after it."""
        self.notes: list[tuple[int, dict[str, Any]]] = []
        """(number of charges before it, record) of every record that charges nothing: terms of runs, and seals."""
        for record, line_hash in zip([header, *content.records], content.hashes, strict=True) if content else ():
            if "event" in record:
                self._after.append([])
            elif record is not header:
                note = {name: value for name, value in record.items() if name not in ("seq", "previous")}
                self.notes.append((len(self._after) - 1, note))
            self._after[-1].append(line_hash)
        self._paid = {entry.release: entry.event for entry in entries}
        self._counts = Counter(entry.event for entry in entries)
        self._writer = writer
        self._read_only = writer is None and content is not None
        self.witnesses: list[LedgerWitness] = []

    @classmethod
    def in_memory(cls, **header: Any) -> Self:
        """Create a ledger in memory, for runs without a folder."""
        return cls({"format": FORMAT, "version": VERSION, **header}, [], None)

    @classmethod
    @checked
    def create(cls, path: str | Path, **header: Any) -> Self:
        """Create a ledger file; refuse to replace one. `header` may hold delta, adjacency and other facts about the run."""
        path = Path(path)
        content = {"format": FORMAT, "version": VERSION, **header}
        try:
            writer = ChainWriter.create(path, content)
            return cls(content, [], writer, Chain(content, [], writer.hashes, 0, False))
        except FileExistsError:
            raise LedgerError(
                f"{path} already exists; resume the run that wrote it, or choose another directory."
            ) from None

    @classmethod
    @checked
    def open(cls, path: str | Path, *, read_only: bool = False) -> Self:
        """Open an existing ledger and check every line.

        A torn last line, left by a crash during `charge`, is dropped: no release followed it. `read_only` changes nothing on disk,
        ignores a torn last line, and works while a run is writing.
        """
        path = Path(path)
        if not path.exists():
            raise LedgerError(f"{path} does not exist; a run writes its ledger before its first round.")
        writer, content = (None, read_chain(path)) if read_only else ChainWriter.open(path)
        try:
            form, version = (content.header.get(name) for name in ("format", "version"))
            if form != FORMAT:
                raise LedgerError(f"{path}, line 1: not a {FORMAT} file.")
            if version != VERSION:
                raise LedgerError(f"{path}, line 1: version {version!r}; this library reads version {VERSION}.")
            entries = _entries(path, content.records)
        except BaseException:
            if writer is not None:
                writer.close()
            raise
        return cls(content.header, entries, writer, content)

    @property
    def entries(self) -> tuple[LedgerEntry, ...]:
        return tuple(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def mark(self) -> LedgerMark:
        """Return the present position of the ledger, for a checkpoint to store."""
        return LedgerMark(len(self), self._after[-1][-1] if self._after[-1] else "")

    @property
    def first_hash(self) -> str:
        """The identity of the ledger: the hash of its first line, "" in memory."""
        return self._after[0][0] if self._after[0] else ""

    def holds(self, mark: LedgerMark) -> bool:
        """Return whether `mark` was taken from this ledger or from an earlier state of it."""
        if not 0 <= mark.count <= len(self):
            return False
        return mark.hash in self._after[mark.count] if self._after[0] else mark.hash == ""

    def notes_since(self, mark: LedgerMark) -> list[dict[str, Any]]:
        """Return the terms and seals after `mark`, a mark of this ledger, without seals of what was sealed before, as in copies."""
        lines = [line for group in self._after[mark.count :] for line in group]
        later = len(lines) - 1 - lines.index(mark.hash) - (len(self) - mark.count)
        notes = [note for _, note in self.notes]
        before, after = notes[: len(notes) - later], notes[len(notes) - later :]
        sealed = {note["run"]: note["seal"].items() for note in before if "seal" in note}
        return [
            note for note in after if not ("seal" in note and note["seal"].items() <= sealed.get(note["run"], set()))
        ]

    def describe(self, run: str, **terms: Any) -> None:
        """Record what the statement of a run is computed from, beside its charges. Later terms replace earlier ones."""
        known = self.terms(run)
        if changed := {name: value for name, value in terms.items() if name not in known or known[name] != value}:
            self.add({"run": run, "terms": changed})

    def terms(self, run: str) -> dict[str, Any]:
        """Return the terms of a run: those of the header, if the run created the ledger, and of its records."""
        terms = dict(self.header) if self.header.get("run", run) == run else {}
        for _, note in self.notes:
            terms |= note.get("terms", {}) if note["run"] == run else {}
        return terms

    def seal(self, run: str, **digests: str) -> None:
        """Bind the results of a run, such as the hash of its model, to the charges of that run.

        A later seal of the same run replaces an earlier one.
        """
        if self._read_only or self.sealed(run) != digests:
            self.add({"run": run, "seal": digests})

    def sealed(self, run: str) -> dict[str, str] | None:
        """Return the digests of the last seal of a run; None if it has no seal or was charged after it."""
        seals = ((n, one["seal"]) for n, one in reversed(self.notes) if one["run"] == run and "seal" in one)
        count, digests = next(seals, (0, None))
        return None if any(entry.run == run for entry in self._entries[count:]) else digests

    def add(self, note: dict[str, Any]) -> None:
        """Append a record that charges nothing."""
        if self._read_only:
            raise LedgerError("this ledger was opened for reading; open it without read_only to write to it.")
        with self.lock:
            self.check_newest()
            self._after[-1] += self._append(note)
            self.notes.append((len(self), note))
            self._move_witnesses()

    def _append(self, record: dict[str, Any]) -> list[str]:
        """Write a line, and return its hash in a list; an empty list for a ledger in memory."""
        if self._writer is None:
            return []
        return [self._writer.append({"seq": len(self._writer.hashes), **record})]

    def charge(
        self,
        round: int,
        event: Event,
        *,
        run: str = "",
        noise: str | None = None,
        note: Mapping[str, str] | None = None,
    ) -> bool:
        """Charge a round before its release. Returns whether a charge was added.

        A charge belongs to a run, a round and a noise key. A seeded simulation that computes the same round again with the same
        noise key releases nothing new, so it is not charged twice (False is returned). Without `noise` the noise is fresh, and
        every call is charged. `note` is stored in the line for people who read the file; it does not affect the charge.
        """
        require(isinstance(round, int) and round >= 0, f"round is {round!r}; it must be a whole number, zero or more.")
        if self._read_only:
            raise LedgerError("this ledger was opened for reading; open it without read_only to charge it.")
        entry = LedgerEntry(round, event, run, secrets.token_hex(8) if noise is None else noise)
        paid = self._paid.get(entry.release)
        if paid is not None and paid != event:
            raise LedgerError(
                f"round {round} is already charged with a different event under the same noise; resume with the run's settings, "
                "or start a new run."
            )
        if paid is None:
            self.check_newest()
            named = {"run": run, "round": round, "noise": entry.noise}
            self._after.append(self._append({**(note or {}), **named, "event": to_json(event)}))
            self._entries.append(entry)
            self._paid[entry.release] = event
            self._counts[event] += 1
        self._move_witnesses()
        return paid is None

    def _move_witnesses(self) -> None:
        for witness in self.witnesses:
            witness.move(self)

    def check_newest(self) -> None:
        """Raise `LedgerError` if a witness knows of charges that this ledger lacks, because another copy of it was charged."""
        for witness in self.witnesses:
            witness.check(self)

    def charges(self) -> list[tuple[Event, int]]:
        """Return each distinct event and how often it was charged, as the accountants expect."""
        return list(self._counts.items())

    def guarantee(self, delta: float) -> Guarantee:
        return compose(self.charges(), delta)

    def check(
        self, budget: Budget, event: Event, *, round: int | None = None, run: str = "", noise: str | None = None
    ) -> None:
        """Raise `BudgetExceeded` if one more `event` would exceed the budget; a release that is already charged never does."""
        if round is not None and noise is not None and self._paid.get((run, round, noise)) == event:
            return
        after = compose([*self.charges(), (event, 1)], budget.delta).epsilon
        if after > budget.epsilon:
            spent = self.guarantee(budget.delta).epsilon
            which = "the next round" if round is None else f"round {round}"
            if event.question:
                evaluation = event.question == EVALUATION
                which = f"the evaluation after {which}" if evaluation else f"the vote on the {event.question}"
            raise BudgetExceeded(
                f"the budget is epsilon {budget.epsilon:g} at delta {budget.delta:g}; {spent:.4f} is spent, and {which} would "
                f"make it {after:.4f}. It was not started."
            )

    def close(self) -> None:
        while self.witnesses:
            self.witnesses.pop().close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._read_only = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _entries(path: Path, records: list[dict[str, Any]]) -> list[LedgerEntry]:
    entries: list[LedgerEntry] = []
    interned: dict[Event, Event] = {}
    for seq, record in enumerate(records, start=1):
        try:
            require(record["seq"] == seq, f"it is numbered {record['seq']!r} where {seq} was due")
            if "event" not in record:
                digests, terms = record.get("seal", {}), record.get("terms", {})
                right = isinstance(digests, dict) and all(isinstance(one, str) for one in digests.values())
                require(isinstance(record["run"], str) and right, "its seal is not a table of digests")
                require(isinstance(terms, dict) and ("seal" in record) != ("terms" in record), "its terms are no table")
                continue
            require(type(record["round"]) is int, f"its round is {record['round']!r}")
            event = from_json(record["event"])
            # Use every number once, so that a field of the wrong type raises here and not in an accountant.
            if isinstance(event, GaussianEvent):
                _ = float(event.mu) + float(event.radius)
            elif isinstance(event, PrivUnitEvent):
                _ = float(event.epsilon) + float(event.nominal) + float(event.k)
            run, noise = record["run"], record["noise"]
            require(isinstance(run, str) and isinstance(noise, str), "its run or noise is not a name")
            entries.append(LedgerEntry(record["round"], interned.setdefault(event, event), run, noise))
        except (InputError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise LedgerError(
                f"{path}, line {seq + 1}: not a charge ({error}). Restore the ledger from a backup."
            ) from None
    return entries


@dataclass(frozen=True)
class Chain:
    """The content of a chain file: first line, records, hashes of all lines, size in bytes, and whether a torn line follows."""

    header: dict[str, Any]
    records: list[dict[str, Any]]
    hashes: list[str]
    complete_bytes: int
    torn: bool


def head_path(path: Path) -> Path:
    return path.with_name(path.name + ".head")


def read_chain(path: Path) -> Chain:
    """Read a chain file; check its lines by their hashes and by the head file. Raise `LedgerError` naming the first wrong line."""
    contents: list[dict[str, Any]] = []
    hashes: list[str] = []
    complete, torn = 0, False
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
            if len(line) > _MAX_LINE or complete + len(line) > _MAX_BYTES:
                raise LedgerError(
                    f"{path}, line {number}: longer than any ledger of this library; the file is damaged."
                )
            if torn := not line.endswith(b"\n"):
                break
            content, line_hash = _checked_content(path, number, line, hashes[-1] if hashes else _GENESIS)
            contents.append(content)
            hashes.append(line_hash)
            complete += len(line)
    if not contents:
        raise LedgerError(f"{path} has no complete first line; it is not a ledger, or it was emptied.")
    _check_head(path, hashes)
    return Chain(contents[0], contents[1:], hashes, complete, torn)


class ChainWriter:
    """The end of a chain file, open for appending, and locked so that two runs cannot interleave their records."""

    def __init__(self, path: Path, fd: int, hashes: list[str]) -> None:
        self._path, self._fd, self.hashes = path, fd, hashes
        # A writer that is garbage-collected without `close` must release the lock.
        self.close = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> Self:
        """Create a file that appears with its first line complete or not at all; raise `FileExistsError` if it exists."""
        line, last_hash = _hashed_line(header, _GENESIS)
        create_file(path, line)
        writer = cls(path, _open_locked(path), [last_hash])
        writer._write_head()
        return writer

    @classmethod
    def open(cls, path: Path) -> tuple[Self, Chain]:
        """Open an existing file for appending, and return the writer and the content; a torn last line is dropped."""
        writer = cls(path, _open_locked(path), [])
        try:
            chain = read_chain(path)
            if chain.torn:
                os.ftruncate(writer._fd, chain.complete_bytes)
                os.fsync(writer._fd)
            writer.hashes = chain.hashes
            writer._write_head()
        except BaseException:
            writer.close()
            raise
        return writer, chain

    def append(self, record: dict[str, Any]) -> str:
        """Append a record; return its hash after the record and the updated head file are on disk."""
        previous = self.hashes[-1]
        line, last_hash = _hashed_line({**record, "previous": previous}, previous)
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)
        self.hashes.append(last_hash)
        self._write_head()
        return last_hash

    def _write_head(self) -> None:
        head = {"count": len(self.hashes) - 1, "hash": self.hashes[-1]}
        replace_bytes(head_path(self._path), _dump(head) + b"\n")


def _hashed_line(content: dict[str, Any], previous: str) -> tuple[bytes, str]:
    """Return the line of a record, which ends with its hash, and the hash; `previous` is the hash of the line before."""
    text = _dump(content)
    digest = hashlib.sha256(previous.encode() + text).hexdigest()
    return text[:-1] + b',"hash":"' + digest.encode() + b'"}\n', digest


def _checked_content(path: Path, number: int, line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    changed = LedgerError(
        f"{path}, line {number}: its hash does not match: it was changed after it was written. Restore a backup."
    )
    text, separator, tail = line[:-1].rpartition(b',"hash":"')
    digest = hashlib.sha256(previous.encode() + text + b"}").hexdigest()
    if not separator or tail != digest.encode() + b'"}':
        raise changed
    try:
        content = json.loads(text + b"}")
    except (ValueError, RecursionError):
        raise changed from None
    if not isinstance(content, dict):
        raise changed
    return content, digest


def _check_head(path: Path, hashes: list[str]) -> None:
    """Raise `LedgerError` unless the file has all records that its head file counts, with its hash, and at most one more."""
    records = len(hashes) - 1
    head = head_path(path)
    try:
        with open(head, "rb") as file:
            content = json.loads(file.read(_MAX_LINE))
        count, last_hash = content["count"], content["hash"]
    except FileNotFoundError:
        if records:
            raise LedgerError(
                f"{head} is missing beside a ledger with {records} charges; it has their number, so without it removed lines "
                "can't be detected. Restore both files from the newest backup."
            ) from None
        return
    except (ValueError, KeyError, TypeError, RecursionError):
        count = last_hash = None
    if not isinstance(count, int) or count < 0 or not isinstance(last_hash, str):
        raise LedgerError(f"{head} was changed after it was written.")
    if count > records:
        raise LedgerError(f"{path} holds {records} charges but {count} were made; its last lines are missing.")
    if hashes[count] != last_hash or records > count + 1:
        raise LedgerError(f"{path} and {head} do not belong together; one of them was replaced.")


def _dump(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).encode()


def _open_locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        try_lock(fd)  # without file locks, the hash chain still detects interleaved records
    except BlockingIOError:
        os.close(fd)
        raise LedgerError(f"{path} is in use by another run; two runs cannot charge one ledger.") from None
    return fd
