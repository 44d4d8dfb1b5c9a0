"""A run's ledger and checkpoint, opened together so that neither goes on without the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp.accounting import Ledger
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.round import State
from dpfedexp.simulation import checkpoint
from dpfedexp.simulation.checkpoint import Checkpoint, Progress
from dpfedexp.simulation.engine import Simulation
from dpfedexp.simulation.identity import Settings, settings_hash


def find(folder: Path | None, resume: bool) -> Checkpoint | None:
    """What there is to go on from. A folder that holds a checkpoint is not written over unless the run is to be resumed."""
    if folder is None:
        require(not resume, "resume is True, but checkpoint is missing; it must name the folder to resume from.")
        return None
    if resume:
        return checkpoint.load(folder)
    require(
        not checkpoint.exists(folder),
        f"the folder {str(folder)!r} holds the checkpoint of a run; resume it, or name another folder.",
    )
    return None


@dataclass
class Keeping:
    """Where a run stands, in memory and on disk."""

    simulation: Simulation
    settings: Settings
    folder: Path | None
    book: Ledger
    state: State
    history: list[dict[str, Any]]
    owned: bool

    @staticmethod
    def open(
        simulation: Simulation,
        settings: Settings,
        ledger: Ledger | Path | str | None,
        folder: Path | None,
        found: Checkpoint | None,
        *,
        resume: bool,
    ) -> Keeping:
        if ledger is None and folder is not None:
            ledger = folder / "ledger.jsonl"
        owned = isinstance(ledger, Path | str)
        if found is not None and folder is not None:
            checkpoint.check_same(found, settings, folder)
        try:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            book = _ledger(ledger, _header(simulation, settings), resume=resume, needed=found is not None)
        except OSError as error:
            raise InputError(f"the ledger {str(ledger)!r} can't be written: {error.strerror}.") from None
        try:
            if found is None or folder is None:
                return Keeping(simulation, settings, folder, book, simulation.begin(), [], owned)
            state = checkpoint.resume(found, simulation, book, folder)
            return Keeping(simulation, settings, folder, book, state, list(found.progress.history), owned)
        except BaseException:
            if owned:
                book.close()
            raise

    def keep(self, state: State, record: dict[str, Any], *, last: bool) -> None:
        """The round is complete once this returns."""
        self.state = state
        self.history.append(record)
        if self.folder is not None:
            bound = self.simulation
            counted = (len(self.book), bound.chunk_size)
            progress = Progress(state.round, state.radius, self.settings, *counted, self.history, bound.trainer.name)
            checkpoint.save(self.folder, state, progress, last=last)

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *_: object) -> None:
        if self.owned:
            self.book.close()


def _header(simulation: Simulation, settings: Settings) -> dict[str, Any]:
    """What a reader of the ledger alone needs for a statement."""
    return {
        "config_hash": settings_hash(settings),
        "algorithm": simulation.algorithm.name,
        "clients": simulation.population,
        "delta": simulation.algorithm.delta,
        "simulated": simulation.system is None,
    }


def _ledger(ledger: Ledger | Path | str | None, header: dict[str, Any], *, resume: bool, needed: bool) -> Ledger:
    if ledger is None:
        return Ledger.in_memory()
    if isinstance(ledger, Ledger):
        return ledger
    path = Path(ledger)
    if not resume or not (needed or path.exists()):
        return Ledger.create(path, **header)
    try:
        return Ledger.open(path, repair=True, config_hash=header["config_hash"])
    except LedgerError as error:
        raise LedgerError(f"the run can't be resumed: {error}") from None
