"""How far a ledger had come, as a small file outside the run's folder: an older copy of it, and a second one, are noticed."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

from dpfedexp.accounting.ledger import Ledger, Mark
from dpfedexp.errors import LedgerError
from dpfedexp.files import replace_text, try_lock

LARGEST_TEXT = 4096


def write_mark(path: Path, mark: Mark, mode: int | None = None) -> None:
    """Returns when the mark is on disk. An `OSError` goes to whoever charges, so that nothing is released without it."""
    replace_text(path, json.dumps({"count": mark.count, "hash": mark.hash}) + "\n", mode)


def read_mark(path: Path) -> Mark | None:
    """The mark in a file, None where it is damaged. `FileNotFoundError` where there is none."""
    with open(path, "rb") as file:
        content = file.read(LARGEST_TEXT)
    try:
        values = json.loads(content)
        mark = Mark(values["count"], values["hash"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return mark if type(mark.count) is int and mark.count >= 0 and isinstance(mark.hash, str) else None


class Anchor(Protocol):
    """A mark that is kept outside a run's folder."""

    @property
    def file(self) -> Path:
        """Where it is kept."""

    def mark(self) -> Mark | None:
        """The mark; None where there is none yet."""

    def remember(self, mark: Mark) -> None:
        """Replaces the mark; returns when it is on disk."""


Refusal = Callable[[Ledger, Mark, Path], LedgerError]
"""(ledger, mark, file) → the error for a ledger that is not the one whose mark the anchor keeps."""


class OneWriter:
    """Keeps a ledger to one writer at a time, whichever copy of its folder the writer has.

    The anchor's lock is held from here to `close`, so a second writer is refused before its clients train. Every charge moves the
    anchor by compare and swap: only if the ledger holds the mark that the anchor keeps. Where the file system has no locks, a
    second copy that was opened at the same moment is refused at the latest when it charges, before anything is released.

    Killed between the charge and the move, the ledger is ahead of its anchor, which is no reason to refuse it.

    Args:
        anchor: the mark outside the run's folder.
        refusal: the error for a ledger that does not hold the mark.
        unmarked: the mark of a run that has not charged this ledger yet, which any ledger without its charges may replace.

    Raises:
        LedgerError: another writer holds the anchor.
    """

    def __init__(
        self, anchor: Anchor, refusal: Refusal, unmarked: Callable[[Ledger, Mark], bool] | None = None
    ) -> None:
        self.anchor, self._refusal, self._unmarked = anchor, refusal, unmarked
        self._path = anchor.file.with_name(anchor.file.name + ".lock")
        descriptor = _lock(self._path)
        self._locked = descriptor is not None
        # A writer that is dropped without being closed must not hold the lock for the rest of the process.
        self._close = weakref.finalize(self, _unlock, self._path, descriptor)

    def check(self, ledger: Ledger) -> None:
        """Raises `LedgerError` unless the ledger is the newest copy."""
        mark = self.anchor.mark()
        if mark is None or ledger.holds(mark) or (self._unmarked is not None and self._unmarked(ledger, mark)):
            return
        raise self._refusal(ledger, mark, self.anchor.file)

    def move(self, ledger: Ledger) -> None:
        """The anchor keeps where the ledger stands now, if the ledger is the newest copy."""
        with nullcontext() if self._locked else _exclusive(self._path.with_suffix(".moving")):
            self.check(ledger)
            self.anchor.remember(ledger.mark())

    def close(self) -> None:
        self._close()


def _lock(path: Path) -> int | None:
    """The descriptor of the locked file; None where there are no locks."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not try_lock(descriptor):
                os.close(descriptor)
                return None
        except BlockingIOError:
            os.close(descriptor)
            raise LedgerError(
                f"the run is in use by another process, which may have a copy of its folder: it holds {str(path)!r}; wait until it "
                "has ended, and go on with the folder that it leaves."
            ) from None
        # The writer before may have removed the file between the opening and the lock.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _unlock(path: Path, descriptor: int | None) -> None:
    with suppress(OSError):  # it went with the private folder, or the system keeps files that are open
        path.unlink()
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One process at a time, by the creation of a file, which network file systems without locks do at once too."""
    for left in range(100, -1, -1):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            break
        except FileExistsError:
            if not left:
                raise LedgerError(
                    f"{str(path)!r} exists: another copy of the run is being charged, or was killed while it was; delete the file "
                    "if no other process runs."
                ) from None
            time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
