"""Where a run's ledger comes from, and how it is opened."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp.accounting.ledger import Ledger
from dpfedexp.errors import LedgerError
from dpfedexp.runs.file_names import LEDGER


@dataclass(frozen=True)
class LedgerSource:
    """Where the ledger comes from.

    Attributes:
        given: an object of the caller's.
        path: a file; without either the ledger lives in memory.
        own: whether it is the file in the run's own folder, which one run alone begins.
    """

    given: Ledger | None
    path: Path | None
    own: bool

    @staticmethod
    def of(ledger: Ledger | Path | str | None, folder: Path | None) -> LedgerSource:
        if isinstance(ledger, Ledger):
            return LedgerSource(ledger, None, own=False)
        default = None if folder is None else folder / LEDGER
        path = default if ledger is None else Path(ledger)
        own = path is not None and default is not None and path.resolve() == default.resolve()
        return LedgerSource(None, path, own)

    @property
    def exists(self) -> bool:
        return self.path is not None and self.path.exists()

    @contextmanager
    def opened(self, ledger: Ledger) -> Iterator[Ledger]:
        """Closes what was opened here if the run can't go on with it; an object of the caller's stays open."""
        try:
            yield ledger
        except BaseException:
            if self.given is None:
                ledger.close()
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

    def existing(self, settings: str | None) -> Ledger:
        """For a run that goes on: the ledger must exist.

        Args:
            settings: the hash by which the ledger knows them (`settings_hash`); None where a checkpoint names them.
        """
        if self.given is not None:
            return self.given
        if self.path is None or not self.exists:
            raise LedgerError(
                f"the run can't be resumed: its ledger {str(self.path)!r} is missing, so nobody could say what was charged. Put it "
                "and its .head file back, or begin a new run in a new folder."
            )
        try:
            ledger = Ledger.open(self.path, repair=True)
        except LedgerError as error:
            raise LedgerError(f"the run can't be resumed: {error}") from None
        if settings is not None and ledger.header.get("config") != settings:
            ledger.close()
            raise LedgerError(
                f"the run can't be resumed: {self.path} was written by a run with other settings, and no checkpoint says which; "
                "resume it with those, or begin a new run in a new folder."
            )
        return ledger
