"""Where a run's ledger comes from, and how it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp.accounting.ledger import Ledger
from dpfedexp.errors import LedgerError

LEDGER = "ledger.jsonl"


@dataclass(frozen=True)
class Source:
    """An object of the caller's, a file, or memory. `own` is the file in the run's own folder, which one run alone begins with."""

    given: Ledger | None
    path: Path | None
    own: bool

    @staticmethod
    def of(ledger: Ledger | Path | str | None, folder: Path | None) -> Source:
        if isinstance(ledger, Ledger):
            return Source(ledger, None, own=False)
        default = None if folder is None else folder / LEDGER
        path = default if ledger is None else Path(ledger)
        own = path is not None and default is not None and path.resolve() == default.resolve()
        return Source(None, path, own)

    @property
    def exists(self) -> bool:
        return self.path is not None and self.path.exists()

    @contextmanager
    def opened(self, book: Ledger) -> Iterator[Ledger]:
        """Closes what was opened here if the run can't go on with it, and leaves an object of the caller's as it was."""
        witness = book.witness
        try:
            yield book
        except BaseException:
            book.witness = witness
            if self.given is None:
                book.close()
            raise

    def new(self, header: dict[str, Any]) -> Ledger:
        """For a run that begins: the ledger in its own folder must not exist yet, any other may."""
        if self.given is not None:
            return self.given
        if self.path is None:
            return Ledger.in_memory()
        if self.exists and not self.own:
            return Ledger.open(self.path, repair=True)
        return Ledger.create(self.path, **header)

    def existing(self, config_hash: str | None) -> Ledger:
        """For a run that goes on: the ledger must exist."""
        if self.given is not None:
            return self.given
        if self.path is None or not self.exists:
            raise LedgerError(
                f"the run can't be resumed: its ledger {str(self.path)!r} is missing, so nobody could say what was charged. Put it "
                "and its .head file back, or begin a new run in a new folder."
            )
        try:
            return Ledger.open(self.path, repair=True, config_hash=config_hash)
        except LedgerError as error:
            raise LedgerError(f"the run can't be resumed: {error}") from None
