"""A run's ledger, checkpoint and private folder, opened together so that none of them goes on without the others."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from dpfedexp.accounting.chain import head_path
from dpfedexp.accounting.ledger import Ledger, Mark
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.files import undate
from dpfedexp.round import State
from dpfedexp.runs import checkpoint, outlets
from dpfedexp.runs.checkpoint import Checkpoint, Progress
from dpfedexp.runs.ledger_source import LEDGER, Source
from dpfedexp.runs.private import NOTHING_CHARGED, PrivateFolder, SharedAnchor, is_run_id
from dpfedexp.runs.settings import Settings, data_tag, settings_hash
from dpfedexp.simulation.rounds import Simulation


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
    """Where a run stands, in memory and on disk. `simulation` has the name that the ledger knows the run by."""

    simulation: Simulation
    settings: Settings
    folder: Path | None
    private: PrivateFolder | None
    book: Ledger
    state: State
    history: list[dict[str, Any]]
    owned: bool
    witness_before: Callable[[Mark], None] | None = None
    began: float = field(default_factory=time.time)

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
        """Begins a run, or goes on with the one in `folder`, whose ledger is `folder/ledger.jsonl` unless another is named.

        A ledger elsewhere may belong to a project: every run that names it adds its charges to those that are there.
        """
        source = Source.of(ledger, folder)
        try:
            if folder is None:
                return _begin(simulation, settings, source, folder)
            if found is not None:
                checkpoint.check_same(found, settings, folder)
            folder.mkdir(parents=True, exist_ok=True)
            if found is not None or (resume and source.own and source.exists):
                return _go_on(simulation, settings, source, folder, found)
            if resume and source.own:
                _check_nothing_was_released(folder)
            return _begin(simulation, settings, source, folder)
        except OSError as error:
            raise InputError(f"the ledger {str(source.path)!r} can't be written: {error.strerror}.") from None

    def keep(self, state: State, record: dict[str, Any], *, last: bool) -> None:
        """The round is complete once this returns."""
        self.state = state
        self.history.append(record)
        if self.private is None:
            return
        controls = None if last else state.client_controls
        if controls is not None:
            self.private.save_controls(state.round, controls)
        self.save(controls=controls is not None)
        if last:
            self.private.remove()
        else:
            self.private.forget_controls(but=state.round)

    def stop(self) -> None:
        """The budget ended the run: what clients remember leaves the disk. A larger budget can still go on from here."""
        if self.private is None or self.state.client_controls is None:
            return
        if self.state.round > 0:
            self.save(controls=False)
        self.private.forget_controls()

    def save(self, *, controls: bool) -> None:
        """Writes the checkpoint; `controls` says that the private folder holds what clients remember."""
        if self.folder is None:
            return
        bound, state = self.simulation, self.state
        sizes = {"chunk_size": bound.chunk_size, "trainer": bound.trainer.name}
        shown = outlets.recorded(checkpoint.NAME, sizes, secure=bound.system is not None)
        named = (self.settings, bound.run, self.book.mark(), self.history, controls)
        checkpoint.save(self.folder, state, Progress(state.round, state.radius, *named, **shown))

    def watch(self, *, shared: bool) -> None:
        """From here on every charge moves the anchors before its round is released.

        The ledger in a run's own folder has an anchor for all its runs only once another run has charged it.
        """
        if self.private is None:
            return
        anchors: list[PrivateFolder | SharedAnchor] = [self.private] if self.private.exists else []
        if self.book.first_hash:
            anchor = SharedAnchor.of(self.book.first_hash)
            known = anchor.mark()
            if known is not None and not self.book.holds(known):
                raise _taken_back(self.book, known, anchor.path)
            if shared or known is not None:
                anchors.append(anchor)

        def witness(mark: Mark) -> None:
            for one in anchors:
                one.remember(mark)

        witness(self.book.mark())
        self.witness_before, self.book.witness = self.book.witness, witness

    def __enter__(self) -> Keeping:
        return self

    def __exit__(self, *_: object) -> None:
        if self.private is not None:
            self.book.witness = self.witness_before
        if self.owned:
            self.book.close()
        if self.folder is not None and self.simulation.system is not None:
            # How long a round took depends on what the clients hold.
            undate(self.folder, outlets.OUTLETS, self.began)


def _begin(simulation: Simulation, settings: Settings, source: Source, folder: Path | None) -> Keeping:
    """A new run. Its private folder comes first, so that wherever there is a ledger of its own there is the folder too."""
    private = None if folder is None else PrivateFolder.of(simulation.run, folder)
    created = False
    try:
        if private is not None:
            private.begin(partial(data_tag, simulation.task.clients))
        with source.opened(source.new(_header(simulation, settings))) as book:
            created = source.own
            owned = source.given is None
            kept = Keeping(simulation, settings, folder, private, book, simulation.begin(), [], owned)
            kept.watch(shared=not source.own)
            if not source.own:
                # The header of a run's own ledger has its name; here a crash before the first checkpoint would lose it.
                kept.save(controls=False)
            return kept
    except BaseException:
        if private is not None and not created:
            private.remove()
        raise


def _go_on(
    simulation: Simulation, settings: Settings, source: Source, folder: Path, found: Checkpoint | None
) -> Keeping:
    """The run that the folder holds, from its checkpoint, or from its start where it has a ledger alone."""
    with source.opened(source.existing(settings_hash(settings) if found is None else None)) as book:
        run = _run_of(book, folder) if found is None else found.progress.run
        simulation, private = replace(simulation, run=run), PrivateFolder.of(run, folder)
        state, history = simulation.begin(), []
        if found is not None:
            checkpoint.check_charged(found, book, folder)
        if found is not None and found.progress.round >= settings["rounds"]:
            # Nothing is left to compute, so neither the data nor the clients' memory is asked for.
            private.remove()
            state, history = checkpoint.resume(found, simulation, folder), list(found.progress.history)
        else:
            _check_anchor(book, private)
            private.check_data(partial(data_tag, simulation.task.clients))
            if found is not None:
                controls = _controls(found.progress, state, private)
                state, history = checkpoint.resume(found, simulation, folder, controls), list(found.progress.history)
            private.forget_controls(but=state.round)
        kept = Keeping(simulation, settings, folder, private, book, state, history, source.given is None)
        kept.watch(shared=not source.own)
        return kept


def _controls(progress: Progress, start: State, private: PrivateFolder) -> Tensor | None:
    if start.client_controls is None:
        return None
    if progress.controls:
        return private.load_controls(progress.round)
    if progress.round > 0:
        warnings.warn(
            "the clients' control variates were deleted when the budget ended the run; they begin again at zero.",
            stacklevel=2,
        )
    return None


def _check_anchor(book: Ledger, private: PrivateFolder) -> None:
    anchor = private.anchor()
    began = anchor == NOTHING_CHARGED and not any(entry.run == private.run for entry in book.entries)
    if not began and not book.holds(anchor):
        raise _taken_back(book, anchor, private.path)


def _taken_back(book: Ledger, anchor: Mark, where: Path) -> LedgerError:
    return LedgerError(
        f"the run can't be resumed: its ledger holds {len(book)} charges and is not the one that had {anchor.count} at the last "
        f"release ({str(where)!r} remembers it), so it was taken back to an earlier state or replaced. Put the newest copy of the "
        "ledger, its .head file and the checkpoint back, or begin a new run with a ledger that holds what was spent."
    )


def _check_nothing_was_released(folder: Path) -> None:
    """A folder without ledger and checkpoint is one in which a run begins, unless something else remembers another."""
    metrics = folder / "metrics.jsonl"
    if head_path(folder / LEDGER).exists() or (metrics.exists() and metrics.stat().st_size > 0):
        raise LedgerError(
            f"the run can't be resumed: the folder {str(folder)!r} has traces of a run, but its ledger is missing, so nobody could "
            "say what was charged. Put it back, or begin a new run in a new folder."
        )


def _run_of(book: Ledger, folder: Path) -> str:
    run = book.header.get("run")
    if not is_run_id(run):
        raise LedgerError(
            f"the run can't be resumed: the ledger in {str(folder)!r} does not name its run, as those of earlier versions do not. "
            "Finish it with the version of dpfedexp that wrote it, or begin a new run in a new folder."
        )
    return str(run)


def _header(simulation: Simulation, settings: Settings) -> dict[str, Any]:
    """What a reader of the ledger alone needs for a statement."""
    header = {
        "config": settings_hash(settings),
        "algorithm": simulation.algorithm.name,
        "clients": simulation.population,
        "delta": simulation.algorithm.delta,
        "simulated": simulation.system is None,
        "run": simulation.run,
    }
    shown = outlets.recorded(LEDGER, header, secure=simulation.system is not None)
    return {"config_hash": shown.pop("config"), **shown}
