"""The ledger, checkpoint and private folder of a run, opened together so that they stay consistent."""

import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from dpfedexp.accounting.ledger import Ledger
from dpfedexp.algorithms.round import State
from dpfedexp.core.local_optimizer import LocalOptimizer
from dpfedexp.core.modules import Layout
from dpfedexp.engine import checkpoint, outlets, private_folder
from dpfedexp.engine.checkpoint import DERIVED, Checkpoint, NamedValues, Progress
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.outlets import CHECKPOINT, LEDGER, LEDGER_HEAD, METRICS
from dpfedexp.engine.run import RunFacts, RunFolder, call_text, model_tensors
from dpfedexp.engine.simulated import Simulation
from dpfedexp.errors import LedgerError, warn
from dpfedexp.files import set_dates, writing
from dpfedexp.mechanisms.serialization import text_fields


@dataclass(frozen=True)
class LedgerSource:
    """Where the ledger of a run comes from: an object that was passed, a file, or memory.

    `own`: whether the ledger is the file in the run's own folder, which only this run may create.
    """

    given: Ledger | None
    path: Path | None
    own: bool

    @classmethod
    def of(cls, ledger: Ledger | Path | str | None, folder: Path | None) -> Self:
        if isinstance(ledger, Ledger):
            return cls(ledger, None, own=False)
        default = None if folder is None else folder / LEDGER
        path = default if ledger is None else Path(ledger)
        own = path is not None and default is not None and path.resolve() == default.resolve()
        return cls(None, path, own)

    @property
    def exists(self) -> bool:
        return self.path is not None and self.path.exists()

    @contextmanager
    def opened(self, ledger: Ledger) -> Iterator[Ledger]:
        """Close the ledger if the run can't continue, unless the caller passed the object."""
        try:
            yield ledger
        except BaseException:
            if self.given is None:
                ledger.close()
            raise

    def new(self, header: dict[str, Any]) -> Ledger:
        """The ledger of a new run. The ledger in the run's own folder must not exist yet; any other may."""
        if self.given is not None:
            return self.given
        if self.path is None:
            return Ledger.in_memory(**header)
        if self.exists and not self.own:
            return Ledger.open(self.path)
        return Ledger.create(self.path, **header)

    def existing(self, settings: str | None) -> Ledger:
        """The ledger of a resumed run. `settings` is the hash that its header must have where no checkpoint names the settings."""
        if self.given is not None:
            return self.given
        if self.path is None or not self.exists:
            raise LedgerError(
                f"the run can't be resumed: its ledger {str(self.path)!r} is missing, so what was charged is unknown. Restore it "
                "with its .head file, or start a new run in a new folder."
            )
        try:
            ledger = Ledger.open(self.path)
        except LedgerError as error:
            raise LedgerError(f"the run can't be resumed: {error}") from None
        if settings is not None and ledger.header.get("config") != settings:
            ledger.close()
            raise LedgerError(
                f"the run can't be resumed: {self.path} was written by a run with other settings, and no checkpoint says which; "
                "resume it with those, or begin a new run in a new folder."
            )
        return ledger


@dataclass(frozen=True)
class RunDescription:
    """An engine, its number of rounds, the settings that the result depends on, and facts for the statement.

    Attributes:
        data: maps a key to the keyed hash of the clients' data; None where other machines hold the data.
        sizes: chunk size and trainer, which affect the rounding of a simulation.
        not_covered: values that the privacy statement does not cover.
        reporting: maps the history to the smallest number of clients that report in a round; None for all clients.
        no_other_adjacency: why the statement has no ε for the other adjacency; empty where it has one.
    """

    engine: Engine
    rounds: int
    settings: NamedValues
    start: State
    data: private_folder.Tag | None = None
    sizes: dict[str, Any] = field(default_factory=dict)
    not_covered: tuple[str, ...] = ()
    reporting: Callable[[list[dict[str, Any]]], int] | None = None
    no_other_adjacency: str = ""

    def terms(self, history: list[dict[str, Any]], stop_source: str = "") -> dict[str, Any]:
        """What the statement is computed from, beside the charges: a record of the ledger."""
        run = self.engine
        terms = {
            "algorithm": run.algorithm.name,
            "clients": run.population,
            "delta": run.algorithm.delta,
            "simulated": not run.secure,
            "planned_rounds": self.rounds,
            "not_covered": list(self.not_covered),
            "reporting": None if self.reporting is None else self.reporting(history),
            "no_other_adjacency": self.no_other_adjacency,
            "stopping": stop_source,
            "complete": len(history) >= self.rounds,
            **run.larger_deployment,
            **run.announced(),
        }
        # As they are read from the file, so that terms that did not change are not written again.
        return dict(json.loads(json.dumps(outlets.recorded(LEDGER, terms, secure=run.secure))))

    def ledger_header(self) -> dict[str, Any]:
        """The first line of a new ledger: the settings' hash, and the name and the terms of its first run."""
        settings = checkpoint.settings_hash(self.settings)
        header = {"config": settings, "run": self.engine.run, **self.terms([])}
        return outlets.recorded(LEDGER, header, secure=self.engine.secure)


@dataclass
class OpenRun:
    """An open run: its state after the last completed round, its history, ledger and files."""

    name: str
    description: RunDescription
    folder: Path | None
    private: private_folder.PrivateFolder | None
    ledger: Ledger
    state: State
    history: list[dict[str, Any]]
    opened_here: bool
    stop_source: str = ""
    """What an early stop depended on; part of the statement until the run is complete."""
    writers: list[private_folder.SingleWriter] = field(default_factory=list)
    began: float = field(default_factory=time.time)
    _controls: bool = False
    """Whether the checkpoint says that the private folder holds the clients' control variates."""

    @staticmethod
    def open(
        description: RunDescription, ledger: Ledger | Path | str | None, folder: Path | None, last: Checkpoint | None
    ) -> "OpenRun":
        """Start a run, or resume the run in `folder`. The ledger is `folder/ledger.jsonl` unless another ledger is given.

        A ledger elsewhere may belong to a project: every run that names it adds charges. Without a folder only the ledger is kept.
        A run without a checkpoint restarts from its ledger.
        """
        source = LedgerSource.of(ledger, folder)
        with writing(f"the ledger {str(source.path)!r}"):
            if folder is None:
                return _begin(description, source, folder)
            if last is not None:
                checkpoint.check_same(last, description.settings, folder)
            folder.mkdir(parents=True, exist_ok=True)
            if last is not None or (source.own and source.exists):
                return _go_on(description, source, folder, last)
            if source.own:
                _check_nothing_was_released(folder)
            return _begin(description, source, folder)

    def complete(self, state: State, record: dict[str, Any], *, last: bool) -> None:
        """Record and save a completed round. After the last round, the clients' control variates are deleted."""
        before, self.state = self.state, state
        self.history.append(record)
        if self.folder is None:
            return
        controls = None if last else state.client_controls
        try:
            if self.private is not None and controls is not None:
                self.private.save_controls(state.round, controls)
            self.save(controls=controls is not None)
        except BaseException:
            # An interrupt may come after the checkpoint is on disk.
            progress = checkpoint.read_progress(self.folder)
            if progress is None or progress.round != state.round:
                self.state = before
                self.history.pop()
            raise
        if self.private is not None:
            self.private.forget_controls(but=None if last else state.round)

    def voted(self, state: State) -> None:
        """Save the state after a vote, because holding the vote again would cost ε again."""
        self.state = state
        self.save(controls=self._controls)

    def add_to_last_record(self, more: dict[str, Any]) -> None:
        self.history[-1] = {**self.history[-1], **more}
        self.save(controls=self._controls)

    def end(self, stop_source: str) -> None:
        if stop_source and stop_source != self.stop_source:
            self.stop_source = stop_source
            self.save(controls=self._controls)
        self.describe()

    def describe(self) -> None:
        """Write the run's terms to the ledger, where they changed: `verify` computes the statement from the ledger alone."""
        with writing("the run's terms", " to the ledger", kind=LedgerError):
            self.ledger.describe(self.name, **self.description.terms(self.history, self.stop_source))

    def seal(self, model: nn.Module) -> None:
        """Write the hashes of model and checkpoint to the ledger. The private folder of a complete run is deleted."""
        digests = {"model": checkpoint.digest(model_tensors(model))}
        if self.folder is not None:
            digests["checkpoint"] = checkpoint.digest(checkpoint.state_tensors(self.state))
        elif not self.ledger.first_hash:
            return  # in memory
        with writing("the model's hash", " to the ledger", "; fix this and resume.", LedgerError):
            self.ledger.seal(self.name, **digests)
        if self.state.round >= self.description.rounds:
            self._release()
            if self.private is not None:
                self.private.remove()

    def stop(self) -> None:
        """Delete the clients' control variates after the budget ended the run. A larger budget can resume the run."""
        if self.private is None or self.state.client_controls is None:
            return
        if self.state.round > 0:
            self.save(controls=False)
        self.private.forget_controls()

    def save(self, *, controls: bool) -> None:
        """Write the checkpoint; it records in `controls` whether the private folder holds SCAFFOLD's client control variates."""
        if self.folder is None:
            return
        run, state = self.description, self.state
        self._controls = controls
        public = outlets.recorded(CHECKPOINT, run.sizes, secure=run.engine.secure)
        public["cohort"] = run.engine.cohort.to_checkpoint()
        public["stop_source"] = self.stop_source
        known = (run.settings, self.name, self.ledger.mark(), self.history, controls)
        checkpoint.save(self.folder, state, Progress(state.round, state.radius, *known, **public))

    def hold(self, source: LedgerSource) -> None:
        """Lock the ledger's anchors (its length and last hash, kept elsewhere), so that no copy of the run can charge it.

        Until the run is closed, every charge updates them before its round is released. The ledger in a run's own folder has a
        `SharedAnchor`, one for all runs, if the run protects real data, or once another run has charged the ledger.
        """
        ledger = self.ledger
        held = {one.anchor.file for one in ledger.witnesses if isinstance(one, private_folder.SingleWriter)}
        anchors: list[private_folder.Anchor] = []
        if self.private is not None and self.private.path.exists():
            anchors.append(self.private)
        if ledger.first_hash:
            anchor = private_folder.SharedAnchor.of(ledger.first_hash)
            if not source.own or self.description.engine.secure or anchor.mark() is not None:
                anchors.append(anchor)
                where = (ledger.first_hash, self.name, source.path)
                if len(ledger) and anchor.mark() is None and (others := private_folder.other_ledgers(*where)):
                    raise LedgerError(
                        f"the ledger {str(source.path)!r} has charges, but {str(others[0])!r} names another one: it was "
                        "replaced or rewritten. Restore it, or if it comes from another machine, put it into a new folder."
                    )
                private_folder.remember_ledger(*where)
            elif not len(ledger):
                private_folder.forget_path(source.path)
        try:
            for one in anchors:
                # A nested run on the same ledger object finds the anchor locked by the outer run.
                if one.file not in held:
                    self.writers.append(private_folder.SingleWriter(one, self.name))
            for writer in self.writers:
                writer.move(ledger)
            ledger.witnesses.extend(self.writers)
            self.describe()
        except BaseException:
            self._release()
            raise

    def _release(self) -> None:
        for writer in self.writers:
            if writer in self.ledger.witnesses:
                self.ledger.witnesses.remove(writer)
            writer.close()
        self.writers.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        if self.opened_here:
            self.ledger.close()
        if self.folder is not None and self.description.engine.secure:
            # Durations of rounds depend on the clients' data.
            set_dates(self.folder, outlets.OUTLETS, self.began)


def _begin(run: RunDescription, source: LedgerSource, folder: Path | None) -> OpenRun:
    """Start a new run. The private folder is created before the ledger, so that no own ledger exists without it."""
    name = run.engine.run
    private = _private(run, name, folder)
    created = False
    try:
        if private is not None and run.data is not None:
            private.begin(run.data)
        with source.opened(source.new(run.ledger_header())) as ledger:
            created = source.own
            open_run = OpenRun(name, run, folder, private, ledger, run.start, [], source.given is None)
            open_run.hold(source)
            # A crash must not lose the initial parameters, nor the name of a run that charges a ledger elsewhere.
            open_run.save(controls=False)
            return open_run
    except BaseException:
        if private is not None and not created:
            private.remove()
        raise


def _go_on(run: RunDescription, source: LedgerSource, folder: Path, last: Checkpoint | None) -> OpenRun:
    """Resume the run of a folder from its checkpoint, or from the start where it has only a ledger."""
    with source.opened(source.existing(checkpoint.settings_hash(run.settings) if last is None else None)) as ledger:
        name: Any = ledger.header.get("run") if last is None else last.progress.run
        if not private_folder.is_run_id(name):
            raise LedgerError(
                f"the run can't be resumed: the ledger in {str(folder)!r} does not name its run; put the run's own ledger back, "
                "or start a new run in a new folder."
            )
        if last is None and run.engine.seed is None and any(entry.run == name for entry in ledger.entries):
            # A checkpoint is written before the first charge. New noise would be paid for on top of the run's ε.
            raise LedgerError(
                f"the run in {str(folder)!r} was charged, and its checkpoint is missing, so it can't be resumed; restore the "
                "checkpoint from a copy, or start a new run in a new folder."
            )
        private = _private(run, name, folder)
        state, history, controls = run.start, [], None
        finished = last is not None and last.progress.round >= run.rounds
        if last is not None:
            checkpoint.check_charged(last, ledger, folder)
            sealed = ledger.sealed(name) or {}
            if sealed.get("checkpoint", checkpoint.digest(last.tensors)) != checkpoint.digest(last.tensors):
                raise LedgerError(
                    f"the run can't be resumed: the checkpoint in {str(folder)!r} is not the one that the ledger was sealed "
                    "with. Restore the run's own checkpoint, or start a new run in a new folder."
                )
            run.engine.cohort.from_checkpoint(last.progress.cohort)
        if private is None or run.data is None:
            if not finished:
                _check_anchor(ledger, folder)
        elif finished:
            # No round is left, so neither data nor control variates are needed.
            private.remove()
        else:
            private_folder.check_newest(private, ledger, name)
            private.check_data(run.data)
            controls = None if last is None else _controls(last.progress, run.start, private)
        if last is not None:
            state, history = checkpoint.resume(last, run.start, folder, controls), list(last.progress.history)
        if private is not None and not finished:
            private.forget_controls(but=state.round)
        stop_source = "" if last is None else last.progress.stop_source
        open_run = OpenRun(name, run, folder, private, ledger, state, history, source.given is None, stop_source)
        open_run.hold(source)
        return open_run


def _private(run: RunDescription, name: str, folder: Path | None) -> private_folder.PrivateFolder | None:
    """The private folder; None where the run has no folder or other machines hold the clients' data."""
    private = None if folder is None else private_folder.PrivateFolder.of(name, folder)
    return None if run.data is None else private


def _check_anchor(ledger: Ledger, folder: Path) -> None:
    anchor = private_folder.SharedAnchor.of(ledger.first_hash)
    if anchor.mark() is None and len(ledger):
        raise LedgerError(
            f"the run can't be resumed: the anchor {str(anchor.file)!r} of the ledger in {str(folder)!r} is missing, so an older "
            "copy of the folder would go unnoticed; copy it from the machine where the run was started, or set "
            f"{private_folder.VARIABLE} to the folder that holds it."
        )


def _controls(progress: Progress, start: State, private: private_folder.PrivateFolder) -> Tensor | None:
    if start.client_controls is None:
        return None
    if progress.controls:
        return private.load_controls(progress.round)
    if progress.round > 0:
        warn("the clients' control variates were deleted when the budget ended the run; they begin again at zero.")
    return None


def _check_nothing_was_released(folder: Path) -> None:
    """Raise `LedgerError` if a folder without ledger and checkpoint has other traces of a run."""
    metrics = folder / METRICS
    if (folder / LEDGER_HEAD).exists() or (metrics.exists() and metrics.stat().st_size > 0):
        raise LedgerError(
            f"the run can't be resumed: the folder {str(folder)!r} has traces of a run, but its ledger is missing, so what was "
            "charged is unknown. Restore it, or start a new run in a new folder."
        )


def described(engine: Engine, simulation: Simulation, rounds: int, **more: Any) -> RunDescription:
    """The description of a run with simulated clients; `more` are further settings that its result depends on."""
    task = simulation.task
    tasks = [one.task for one in simulation.candidates or (simulation,)]
    not_covered = ("the values whose names start with nonprivate_, which this run recorded for study",)
    settings = settings_of(
        engine,
        [one.layout for one in tasks],
        [one.local for one in tasks],
        rounds=rounds,
        # None in a secure run: its shuffles come from a secret number, drawn again when the run resumes.
        seed=engine.seed,
        loss=task.loss,
        diagnostics=engine.diagnostics,
        **more,
    )
    return RunDescription(
        engine,
        rounds,
        settings,
        engine.begin(),
        lambda key: private_folder.data_tag(task.clients, key),
        {"chunk_size": simulation.chunk_size, "trainer": simulation.trainer.name},
        not_covered if engine.diagnostics and engine.algorithm.private else (),
        # SCAFFOLD from reports carries a report's noise into the next one, so the noises of the sums are not independent.
        (lambda history: 0) if engine.algorithm.scaffold == "report" else None,
    )


def settings_of(
    engine: Engine, layouts: Sequence[Layout], local: Sequence[LocalOptimizer | None] = (), **more: Any
) -> NamedValues:
    """Name → JSON value of every setting that the result depends on; `layouts` and `local` have an entry for each candidate."""
    mechanism, evaluation, layout = engine.mechanism, engine.evaluation, layouts[0]
    measured: dict[str, Any] = {"local": local[0]} if local else {}
    if evaluation is not None:
        measured |= {"evaluate": str(evaluation.metrics), "evaluate_every": evaluation.every}
        measured |= {"held_out": evaluation.held_out, "mechanism.evaluation": evaluation.mechanism}
    found = checkpoint.flatten(
        {
            "algorithm": engine.algorithm,
            "mechanism": type(mechanism).__name__,
            **{f"mechanism.{name}": value for name, value in text_fields(mechanism.settings()).items()},
            "participation": engine.participation,
            "model": {
                "parameters": dict(zip(layout.names, map(list, layout.shapes), strict=True)),
                "start": private_folder.parameter_tag(engine.start.cpu()),
            },
            "clients": engine.population,
            **measured,
            **more,
        }
    )
    if (tournament := engine.tournament) is not None:
        known = {"names": list(tournament.names), "phases": list(tournament.phases), "follows": tournament.follows}
        found |= checkpoint.flatten({"tournament": known})
        for number, own in enumerate(tournament.engines[1:], start=1):
            of_candidate = settings_of(own, layouts[number:], local[number:])
            found |= {checkpoint.candidate_prefix(number) + name: value for name, value in of_candidate.items()}
    return found


def facts_of(
    engine: Engine,
    open_run: OpenRun,
    folder: RunFolder | None,
    *,
    model: str,
    data: str,
    options: dict[str, Any],
    trainer: str = "",
) -> RunFacts:
    """Public facts about the run for `run.json`. `options` that are None or False are left out of the call's text."""
    algorithm, run = engine.algorithm, open_run.description
    usual = {"clip": math.inf, "noise_multiplier": None, "target_epsilon": None, "adjacency": "replace-one"}
    given = {name: getattr(algorithm, name) for name in usual if getattr(algorithm, name) != usual[name]}
    how = {"local": options.get("local"), "rounds": run.rounds, **options}
    named = {name: value for name, value in how.items() if value is not None and value is not False}
    call = call_text("train", named, model, data, call_text(algorithm.name, given))
    derived = ("algorithm.name", "model.", "nodes", *DERIVED)
    of_candidate = re.compile(r"^candidate \d+\.")
    chosen = {name: value for name, value in run.settings.items() if not of_candidate.sub("", name).startswith(derived)}
    command, known = ("", "") if folder is None else (folder.command, folder.data)
    return RunFacts(
        run=open_run.name,
        algorithm=algorithm.name,
        data=known or f"a {data} from Python",
        model=model,
        clients=engine.population,
        parameters=len(engine.start),
        rounds=run.rounds,
        delta=algorithm.delta,
        secure=run.engine.secure,
        command=command or call,
        trainer="" if run.engine.secure else trainer,
        settings=chosen | {"algorithm": algorithm.name, "model": model, "parameters": len(engine.start)},
    )
