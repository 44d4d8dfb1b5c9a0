"""Finished runs by their full settings: found among the records, made where none is there, never mistaken for each other.

A run that a command has finished is kept in a file of its own until it stands in its section's `runs.jsonl`, so that an interrupted
command goes on where it stopped. The file holds a whole record and is named after a hash of the full settings.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dpfedexp.config import Settings
from dpfedexp.errors import InputError
from dpfedexp.machine import run_jobs
from reproduction.paper.results import record as recording
from reproduction.paper.results.full_settings import differences
from reproduction.paper.results.planned import Place, PlannedRun, Result, TrainingRun
from reproduction.paper.results.record import FILE, MNIST, RESULTS_VERSION, Record, key

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
        made_by = recording.here(place.device)
        run_jobs(
            partial(_run_and_keep, images=images, place=place, made_by=made_by),
            jobs,
            description,
            workers=place.workers,
            cost=lambda job: job[1].cost,
        )

    def drop(self, keys: Iterable[str]) -> None:
        """Forgets runs that are recorded elsewhere now."""
        for one in keys:
            self.path(one).unlink(missing_ok=True)
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


class Results:
    """The finished runs of a section, by their full settings: `results[run]`."""

    def __init__(self, records: Sequence[Record], images: str | None) -> None:
        self.records, self.images = records, images
        self._by_key = {record.key: record for record in records}

    def record(self, run: PlannedRun) -> Record | None:
        found = self._by_key.get(key_of(run, self.images))
        return found if found is not None and found.serves(run) else None

    def __getitem__(self, run: PlannedRun) -> Result:
        found = self.record(run)
        if found is None:
            raise KeyError(f"the section asked for {run.name!r}, which it did not plan")
        return found.result

    def training(self, runs: Iterable[Settings]) -> list[Result]:
        return [self[TrainingRun(settings)] for settings in runs]

    @property
    def on_mnist(self) -> bool:
        """Whether the images are MNIST's, and not another set in their place."""
        return self.images == MNIST

    def why_missing(self, run: PlannedRun) -> str:
        """What sets a run that is not recorded apart from the recorded one that is nearest to it."""
        wanted, images = run.full_settings, self.images if run.needs_images else None
        nearest: tuple[int, str] | None = None
        for one in self.records:
            apart = differences(wanted, one.settings)
            if one.images != images:
                apart.append("the images are others")
            if one.results_version != RESULTS_VERSION:
                apart.append(f"results_version is {RESULTS_VERSION} now and was {one.results_version}")
            if not apart and not one.serves(run):
                apart.append(f"its record keeps no curve of {', '.join(sorted(set(run.curves) - one.curves.keys()))}")
            if nearest is None or len(apart) < nearest[0]:
                nearest = len(apart), f"the nearest record is {one.name!r}, but {'; '.join(apart)}"
        return f"{run.name!r}: {nearest[1] if nearest else 'nothing is recorded'}"


def key_of(run: PlannedRun, images: str | None) -> str:
    return key(run.full_settings, images if run.needs_images else None)


def file_of(folder: Path, section: str) -> Path:
    return folder / section / FILE


def images_of(records: Iterable[Record]) -> str | None:
    """The fingerprint that most of the records carry; what was made with other images is then missing."""
    seen = Counter(record.images for record in records if record.images is not None)
    return seen.most_common(1)[0][0] if seen else None


def missing(runs: Iterable[PlannedRun], results: Results) -> list[PlannedRun]:
    """The runs that are not recorded, each once."""
    unique = {key_of(run, results.images): run for run in runs}
    return [run for run in unique.values() if results.record(run) is None]


def all_records(
    planned: dict[str, list[PlannedRun]], folder: Path, images: str | None, place: Place
) -> dict[str, list[Record]]:
    """Section → the records of its runs. What neither a record nor an interrupted command has left is run.

    Whatever was run or found stands in the section's `runs.jsonl` afterwards, beside the other lines that the file had.
    """
    before = {section: recording.read(file_of(folder, section)) for section in planned}
    others = (read for path in sorted(folder.glob(f"*/{FILE}")) for read in recording.read(path))
    known: dict[str, list[Record]] = {}
    for record in (*(one for records in before.values() for one in records), *others):
        known.setdefault(record.key, []).append(record)
    cache = Cache(folder / FOLDER)

    def find(run: PlannedRun) -> Record | None:
        at = key_of(run, images)
        return next((one for one in known.get(at, ()) if one.serves(run)), None) or cache.load(at)

    absent = {key_of(run, images): run for runs in planned.values() for run in runs if find(run) is None}
    cache.run(absent, images, place)
    done: dict[str, list[Record]] = {}
    for section, runs in planned.items():
        lines = {record.key: record for record in before[section]}
        own = {}
        for run in runs:
            found = find(run)
            if found is None:
                raise RuntimeError(f"the run {run.name!r} left no record")
            own[found.key] = found.kept_for(section, run)
        if own:
            recording.write(file_of(folder, section), [*(lines | own).values()])
        done[section] = list(own.values())
    cache.drop(key_of(run, images) for runs in planned.values() for run in runs)
    return done
