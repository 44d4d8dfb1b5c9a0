"""`runs.jsonl`: one line for every run behind a section, with what made it. Tables and pages are built from these lines alone."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpfedexp.errors import InputError
from dpfedexp.files import replace_text
from reproduction.paper.results.full_settings import flat
from reproduction.paper.results.planned import PlannedRun, Result

RESULTS_VERSION = 1
"""Raised when the same settings would give another result than before, because a formula was corrected."""

FILE = "runs.jsonl"


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        section: whose table or figure it stands behind.
        name: what the section calls it.
        settings: the whole configuration, every default spelled out; a record is found by it.
        seed: of the run; null where the line holds the seeds 0, 1, 2 …, as many as its settings say.
        images: a fingerprint of the images; null where there are none.
        results_version: see `RESULTS_VERSION`.
        finals: name → number; metrics are averages over the last 5 rounds, null where the run diverged.
        curves: name → numbers, those that the section shows.
        promise: ε per round and in total, δ, the number of parameters and the privacy statement.
        commit, dirty, versions, device, seconds: what made it, and its wall-clock time; null where it was never recorded.
        recorded_in: for a result from before these lines: the commit and the file that it was first kept in.
    """

    section: str
    name: str
    settings: dict[str, Any]
    seed: int | None
    images: str | None
    results_version: int
    finals: dict[str, float | None]
    curves: dict[str, list[Any]]
    promise: dict[str, Any]
    commit: str | None
    dirty: bool | None
    versions: dict[str, str] | None
    device: str | None
    seconds: float | None
    recorded_in: dict[str, str] | None

    def to_line(self) -> str:
        tree = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @staticmethod
    def from_line(line: str) -> Record:
        return Record(**json.loads(line))

    @property
    def key(self) -> str:
        """What two records of the same run share."""
        return key(self.settings, self.images, self.results_version)

    @property
    def result(self) -> Result:
        return {"finals": self.finals, "curves": self.curves, "seconds": self.seconds, **self.promise}

    def serves(self, run: PlannedRun) -> bool:
        """Whether it kept the curves that the section shows."""
        return set(run.curves) <= self.curves.keys()

    def kept_for(self, section: str, run: PlannedRun) -> Record:
        """The same run under the name of a section, with the curves that it shows and no others."""
        promise = self.promise if run.curves else {**self.promise, "privacy": None}
        curves = {name: self.curves[name] for name in run.curves}
        return replace(self, section=section, name=run.name, curves=curves, promise=promise)


def key(settings: dict[str, Any], images: str | None, version: int = RESULTS_VERSION) -> str:
    """The full settings as one text, the same whatever the order of the fields."""
    depends = {"settings": flat(settings), "images": images, "results_version": version}
    return json.dumps(depends, sort_keys=True, separators=(",", ":"))


def read(path: Path) -> list[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error.strerror}.") from None
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            records.append(Record.from_line(line))
        except (ValueError, TypeError):
            raise InputError(
                f"line {number} of {str(path)!r} is not the record of a run; take the line out and its run is made again."
            ) from None
    return records


def write(path: Path, records: Iterable[Record]) -> None:
    """Replaces the file; killed at any instant, the old one or the new one is there, complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, "".join(record.to_line() + "\n" for record in records))
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be written: {error.strerror}.") from None
