"""The folder that a run leaves: configuration, ledger, metrics, model and privacy statement."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from dpfedexp.advice.message import Advice
from dpfedexp.config import Settings, load
from dpfedexp.errors import InputError
from dpfedexp.files import replace_tensors, replace_text, undate
from dpfedexp.json_values import finite
from dpfedexp.runs.checkpoints import checkpoint
from dpfedexp.runs.checkpoints.settings import differences, flatten
from dpfedexp.runs.file_names import ADVICE, CONFIG, LEDGER, METRICS, METRICS_TABLE, MODEL, STATEMENT, STATEMENT_TEXT
from dpfedexp.runs.outlets import OUTLETS, recorded
from dpfedexp.runs.run import Run


class RunFolder:
    """Writes metrics as they come, and everything else at the end. `file_names` says what each file is.

    With `resume` the folder may hold an unfinished run. Its metrics are taken back to its checkpoint when the first new round is
    recorded, which is when the run holds the ledger's lock and nobody else is writing.
    """

    def __init__(self, path: Path | str, *, resume: bool = False) -> None:
        self.path = Path(path)
        with self._writing():
            self.path.mkdir(parents=True, exist_ok=True)
            if not resume and any(self.path.iterdir()):
                hint = " or go on with --resume" if checkpoint.exists(self.path) else ""
                raise InputError(f"the folder {str(self.path)!r} is not empty; name a new one with --out{hint}.")
            if resume and any(self.path.iterdir()) and not any(self.path.glob(f"{CONFIG}*")):
                raise InputError(
                    f"the folder {str(self.path)!r} holds files but no run; name the folder of a run with --out."
                )
        self._metrics: TextIO | None = None
        self._began, self._secure = time.time(), False

    @property
    def ledger(self) -> Path:
        return self.path / LEDGER

    def write_config(self, settings: Settings) -> None:
        """Keeps the settings; refuses other ones than those that the folder holds already."""
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

    def record(self, line: dict[str, Any]) -> None:
        with self._writing():
            if self._metrics is None:
                done = checkpoint.read_progress(self.path)
                self._write_metrics(done.history[:-1] if done else [])
                self._metrics = (self.path / METRICS).open("a", encoding="utf-8")
            self._metrics.write(_line(line))
            self._metrics.flush()

    def finish(self, run: Run) -> None:
        tensors = {name: value.detach().contiguous() for name, value in run.model.state_dict().items()}
        with self._writing():
            if self._metrics is not None:
                self._metrics.close()
            self._write_metrics(run.history)
            write_csv(self.path / METRICS_TABLE, run.history)
            replace_tensors(self.path / MODEL, tensors)
            replace_text(self.path / STATEMENT, run.privacy.to_json() + "\n")
            replace_text(self.path / STATEMENT_TEXT, run.privacy.text + "\n")
            replace_text(self.path / ADVICE, "".join(map(self._advice_line, run.advice)))
            if self._secure:
                undate(self.path, OUTLETS, self._began)

    def _advice_line(self, advice: Advice) -> str:
        return _line(recorded(ADVICE, advice.to_json(), secure=self._secure))

    def _write_metrics(self, history: list[dict[str, Any]]) -> None:
        replace_text(self.path / METRICS, "".join(map(_line, history)))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(f"the folder {str(self.path)!r} can't be written: {error.strerror}.") from None


def _line(record: dict[str, Any]) -> str:
    return json.dumps(finite(record)) + "\n"


def _comparable(settings: Settings) -> dict[str, Any]:
    """What may not change between a run and its continuation."""
    return flatten(
        settings.model_dump(
            mode="json", exclude={"resolved": True, "run": {"device", "chunk_size", "memory", "budget"}}
        )
    )


def write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for record in records for key in record))
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, columns)
    writer.writeheader()
    writer.writerows(records)
    replace_text(path, table.getvalue())
