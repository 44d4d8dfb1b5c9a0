"""What a command that has not ended yet has finished: a file to a run, so that an interrupted sweep goes on where it stopped.

A file is written as its run ends, by the process that ran it, and goes away once the run stands in its section's `runs.jsonl`. It
holds a whole record, with the commit and the device that made it; it is named after a hash of the full settings.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dpfedexp.errors import InputError
from dpfedexp.machine import run_all
from reproduction.paper.results import provenance
from reproduction.paper.results.planned import Place, PlannedRun
from reproduction.paper.results.record import RESULTS_VERSION, Record

FOLDER = ".cache"


class Cache:
    """Finished runs in a folder that is no part of the results."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"

    def load(self, key: str) -> Record | None:
        """The record of a finished run; None if it was not run, or if its file was damaged."""
        try:
            record = Record.from_line(self.path(key).read_text(encoding="utf-8"))
        except (OSError, ValueError, TypeError):
            return None
        return record if record.key == key else None

    def run(
        self, missing: Mapping[str, PlannedRun], images: str | None, place: Place, description: str = "training"
    ) -> None:
        """Makes the runs, side by side, and keeps each as it ends. With several processes the long ones come first."""
        if not missing:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the folder {str(self.folder)!r} can't be written: {error.strerror}.") from None
        jobs = [(self.path(key), run) for key, run in missing.items()]
        if place.workers == 1:
            # In one process, runs that share a problem follow each other and find its data on the device.
            jobs.sort(key=lambda job: job[1].problem)
        else:
            jobs.sort(key=lambda job: -job[1].cost)
        # Asked once, here: the source may be edited while a long command runs what it has loaded.
        made_by = provenance.here(place.device)
        run_all(
            partial(_run_and_keep, images=images, place=place, made_by=made_by),
            jobs,
            description,
            workers=place.workers,
            cost=lambda job: job[1].cost,
        )

    def drop(self, keys: Iterable[str]) -> None:
        """Forgets runs that are recorded elsewhere now."""
        for key in keys:
            self.path(key).unlink(missing_ok=True)
        with suppress(OSError):
            self.folder.rmdir()


def _run_and_keep(job: tuple[Path, PlannedRun], images: str | None, place: Place, made_by: dict[str, Any]) -> None:
    path, run = job
    began = time.perf_counter()
    result = run.run(place)
    record = Record(
        section="",
        name=run.name,
        settings=run.full_settings,
        seed=run.seed,
        images=images if run.needs_images else None,
        results_version=RESULTS_VERSION,
        finals=result.pop("finals"),
        curves=result.pop("curves"),
        promise=result,
        seconds=round(time.perf_counter() - began, 3),
        **made_by,
    )
    temporary = path.with_suffix(f".{os.getpid()}.part")
    try:
        temporary.write_text(record.to_line() + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be written: {error.strerror}.") from None
