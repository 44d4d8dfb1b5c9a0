"""Append-only files of JSON lines that show what was done to them.

Every line ends with the SHA-256 of the previous line's hash and its own text, so a changed byte breaks the chain at
the line that was changed. A side file `<name>.head` holds the number of records and the last hash, so removed lines
at the end are noticed too.

`append` writes the line and syncs it, then replaces the head atomically and syncs that, then returns. Killed at any
instant, the file is ahead of its head by at most one record, or ends in a torn line without a newline: both were
never acknowledged, and both open again.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from dpfedexp.errors import LedgerError
from dpfedexp.files import create_file, replace_bytes, try_lock

_MAX_LINE = 64 * 1024
_MAX_BYTES = 2**30
_GENESIS = "0" * 64


@dataclass(frozen=True)
class Chain:
    """What a chain file holds: the first line, the records after it, the hashes of both, and whether a torn line follows."""

    header: dict[str, Any]
    records: list[dict[str, Any]]
    hashes: list[str]
    complete_bytes: int
    torn: bool


def head_path(path: str | Path) -> Path:
    path = Path(path)
    return path.with_name(path.name + ".head")


def read(path: Path) -> Chain:
    """Every line, checked against its hash and against the head. Raises `LedgerError` naming the line that is wrong."""
    contents: list[dict[str, Any]] = []
    hashes: list[str] = []
    complete, torn = 0, False
    with open(path, "rb") as file:
        for number, line in _lines(file, path):
            if not line.endswith(b"\n"):
                torn = True
                break
            content, line_hash = _unseal(path, number, line, hashes[-1] if hashes else _GENESIS)
            contents.append(content)
            hashes.append(line_hash)
            complete += len(line)
    if not contents:
        raise LedgerError(f"{path} has no complete first line; it is not a ledger, or it was emptied.")
    _check_head(path, hashes)
    return Chain(contents[0], contents[1:], hashes, complete, torn)


class ChainWriter:
    """The open end of a chain file, locked so that two runs cannot interleave their records."""

    def __init__(self, path: Path, fd: int, hashes: list[str]) -> None:
        self._path, self._fd, self.hashes = path, fd, hashes
        # A writer that is dropped without being closed must not hold the lock for the rest of the process.
        self._closed = weakref.finalize(self, os.close, fd)

    @classmethod
    def create(cls, path: Path, header: dict[str, Any]) -> ChainWriter:
        """A new file that appears with its first line complete, or not at all.

        Raises `FileExistsError` rather than replace one.
        """
        line, last_hash = _seal(header, _GENESIS)
        create_file(path, line)
        writer = cls(path, _open_locked(path), [last_hash])
        writer._write_head()
        return writer

    @classmethod
    def open(cls, path: Path, *, repair: bool) -> tuple[ChainWriter, Chain]:
        """The end of a file that exists, and what it holds. `repair` drops a torn last line."""
        fd = _open_locked(path)
        writer = None
        try:
            chain = read(path)
            if chain.torn:
                if not repair:
                    raise LedgerError(
                        f"{path} ends in an incomplete line, as a crash leaves it; that line was never acknowledged. "
                        "Open it with repair=True to drop it."
                    )
                os.ftruncate(fd, chain.complete_bytes)
                os.fsync(fd)
            writer = cls(path, fd, chain.hashes)
            writer._write_head()
        except BaseException:
            if writer is None:
                os.close(fd)
            else:
                writer.close()
            raise
        return writer, chain

    def append(self, record: dict[str, Any]) -> None:
        """Returns when the record and the head that counts it are on disk."""
        previous = self.hashes[-1]
        line, last_hash = _seal({**record, "previous": previous}, previous)
        view = memoryview(line)
        while view:
            view = view[os.write(self._fd, view) :]
        os.fsync(self._fd)
        self.hashes.append(last_hash)
        self._write_head()

    def close(self) -> None:
        self._closed()

    def _write_head(self) -> None:
        head = head_path(self._path)
        replace_bytes(head, _dump({"count": len(self.hashes) - 1, "hash": self.hashes[-1]}) + b"\n")


def _lines(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes]]:
    seen = 0
    for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE + 1), b""), start=1):
        seen += len(line)
        if len(line) > _MAX_LINE or seen > _MAX_BYTES:
            raise LedgerError(f"{path}, line {number}: longer than any ledger of this library; the file is damaged.")
        yield number, line


def _seal(content: dict[str, Any], previous: str) -> tuple[bytes, str]:
    text = _dump(content)
    digest = hashlib.sha256(previous.encode() + text).hexdigest()
    return text[:-1] + b',"hash":"' + digest.encode() + b'"}\n', digest


def _unseal(path: Path, number: int, line: bytes, previous: str) -> tuple[dict[str, Any], str]:
    changed = LedgerError(
        f"{path}, line {number}: the line was changed after it was written (its hash does not match)."
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
    """The file holds at least what its head has counted, with the same hashes, and at most one record more."""
    records = len(hashes) - 1
    head = head_path(path)
    try:
        with open(head, "rb") as file:
            content = json.loads(file.read(_MAX_LINE))
        count, last_hash = content["count"], content["hash"]
    except FileNotFoundError:
        if records:
            raise LedgerError(
                f"{head} is missing beside a ledger with {records} charges; without it, removed lines go unnoticed."
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
        try_lock(fd)  # where there are no locks, the chain still shows interleaved records
    except BlockingIOError:
        os.close(fd)
        raise LedgerError(f"{path} is in use by another run; two runs cannot charge one ledger.") from None
    return fd
