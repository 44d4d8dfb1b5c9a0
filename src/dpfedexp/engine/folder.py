"""The folder that a run leaves: configuration, ledger, metrics, model and privacy statement."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dpfedexp.accounting import PrivacyStatement
from dpfedexp.engine import checkpoint
from dpfedexp.engine.checkpoint_settings import differences, flatten
from dpfedexp.engine.facts import RunFacts
from dpfedexp.engine.file_names import CONFIG, FACTS, LEDGER, METRICS
from dpfedexp.engine.outlets import OUTLETS
from dpfedexp.engine.results import line as as_line
from dpfedexp.engine.results import write_history, write_results, write_statement
from dpfedexp.engine.run import Run
from dpfedexp.errors import InputError
from dpfedexp.files import replace_text, undate

if TYPE_CHECKING:
    from dpfedexp.config import Settings


class RunFolder:
    """Writes metrics as they come, and everything else at the end. `file_names` says what each file is.

    With `resume` the folder may hold an unfinished run. Its metrics are taken back to its checkpoint when the first new round is
    recorded, which is when the run holds the ledger's lock and nobody else is writing.

    Args:
        path: the folder.
        resume: go on with the run in it.
        command: the command that the run is made with; a call from Python says it itself.
        data: what the clients' data are, in words.
    """

    def __init__(self, path: Path | str, *, resume: bool = False, command: str = "", data: str = "") -> None:
        self.path, self.command, self.data = Path(path), command, data
        new, again = ("--out", "--resume") if command else ("out", "resume=True")
        with self._writing():
            if self.path.is_file():
                raise InputError(f"{str(self.path)!r} is a file; name a new folder with {new}.")
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume and any(self.path.iterdir()):
                hint = f" or go on with {again}" if checkpoint.exists(self.path) else ""
                raise InputError(f"the folder {str(self.path)!r} is not empty; name a new one with {new}{hint}.")
            traces = (CONFIG,) if command else (CONFIG, FACTS, LEDGER)
            if resume and any(self.path.iterdir()) and not any(any(self.path.glob(f"{one}*")) for one in traces):
                raise InputError(
                    f"the folder {str(self.path)!r} holds files but no run; name the folder of a run with {new}."
                )
        self._metrics: TextIO | None = None
        self._facts: RunFacts | None = None
        self._began, self._secure = time.time(), False

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    def write_config(self, settings: Settings) -> None:
        """Keeps the settings; refuses other ones than those that the folder holds already."""
        from dpfedexp.config import load

        self._secure = bool(settings.run.secure)
        path = self.path / CONFIG
        if path.exists():
            changed = differences(_comparable(settings), _comparable(load(path)))
            if changed:
                raise InputError(
                    f"the folder {str(self.path)!r} holds another run: {changed}. Resume with its settings, or name another folder."
                )
        with self._writing():
            replace_text(path, settings.to_toml())

    def begin(self, facts: RunFacts) -> None:
        """What the run is, once it holds its ledger."""
        self._secure, self._facts = facts.secure, facts
        with self._writing():
            facts.write(self.path)

    def record(self, line: dict[str, Any]) -> None:
        with self._writing():
            if self._metrics is None:
                done = checkpoint.read_progress(self.path)
                write_history(self.path, done.history[:-1] if done else [])
                self._metrics = (self.path / METRICS).open("a", encoding="utf-8")
            self._metrics.write(as_line(line))
            self._metrics.flush()

    def finish(self, run: Run) -> None:
        """Everything that the run came to."""
        self.close()
        with self._writing():
            write_results(self.path, run.model, run.history, run.advice, secure=self._secure)
            if self._facts is not None:
                replace(self._facts, stopped=run.stopped or "").write(self.path)
        self.state(run.privacy)

    def state(self, privacy: PrivacyStatement) -> None:
        """The run's claim; a later one takes the place of an earlier one."""
        restate(self.path, privacy, self._began)

    def close(self) -> None:
        """Nothing more is recorded."""
        if self._metrics is not None:
            self._metrics.close()
            self._metrics = None

    def _writing(self) -> contextlib.AbstractContextManager[None]:
        return _writing(self.path)


def restate(folder: Path, privacy: PrivacyStatement, when: float | None = None) -> None:
    """Writes a run's claim into its folder. The files of a run that protects real data all get one date."""
    with _writing(folder):
        write_statement(folder, privacy)
        if not privacy.simulated:
            undate(folder, OUTLETS, time.time() if when is None else when)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None


def _comparable(settings: Settings) -> dict[str, Any]:
    """What may not change between a run and its continuation."""
    return flatten(
        settings.model_dump(
            mode="json", exclude={"resolved": True, "run": {"device", "chunk_size", "memory", "budget"}}
        )
    )
