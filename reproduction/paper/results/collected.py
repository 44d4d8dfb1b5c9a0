"""Finished runs by their full settings: found among the records, made where none is there, never mistaken for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from dpfedexp.config import Settings
from reproduction.paper.results import record as recording
from reproduction.paper.results.cache import FOLDER, Cache
from reproduction.paper.results.full_settings import differences
from reproduction.paper.results.images import MNIST
from reproduction.paper.results.planned import Place, PlannedRun, Result, TrainingRun
from reproduction.paper.results.record import FILE, RESULTS_VERSION, Record, key


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
