"""The sections of the report by name: which runs each needs, and what it makes of their records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dpfedexp.errors import InputError
from dpfedexp.report.document import Section
from dpfedexp.report.page import report
from reproduction.paper import SECTIONS, beyond, figure1, figure2, figure3, table1, table2, table3
from reproduction.paper.results import record as recording
from reproduction.paper.results.collected import Results, all_records, file_of, images_of, missing
from reproduction.paper.results.planned import Place, PlannedRun
from reproduction.paper.results.record import Record, fingerprint
from reproduction.paper.results.size import Size


@dataclass(frozen=True)
class Maker:
    """How a section is made."""

    planned: Callable[[Size], list[PlannedRun]]
    section: Callable[[Size, Results], Section]


MAKERS = {
    "table1": Maker(table1.planned, table1.section),
    "synthetic": Maker(figure1.planned, figure1.section),
    "mnist": Maker(table3.planned, table3.section),
    "step-size": Maker(figure2.planned, figure2.section),
    "step-history": Maker(figure3.planned, figure3.section),
    "grid": Maker(table2.planned, table2.section),
    "beyond": Maker(beyond.planned, beyond.section),
}

QUICK_SEEDS = 2


def write_page(folder: Path) -> Path:
    """Writes `folder/report.html` of the sections that lie there, in the paper's order."""
    command = f"python -m reproduction paper all --recorded --out {folder}"
    return report(folder, title="DP-FedEXP, reproduced", order=SECTIONS, command=command)


def make(
    names: Sequence[str], size: Size, place: Place, folder: Path, say: Callable[[str], None] = lambda sentence: None
) -> list[Section]:
    """The named sections; the runs that are not recorded in `folder` come first, under one estimate of the time left.

    `say` hears one sentence about each kind of run that was recorded with other settings.
    """
    planned = {name: MAKERS[name].planned(size) for name in names}
    needed = any(run.needs_images for runs in planned.values() for run in runs)
    images = fingerprint(place.data) if needed else None
    for name, runs in planned.items():
        before = recording.read(file_of(folder, name))
        absent = missing(runs, Results(before, images))
        if before and absent:
            say(
                f"{name}: {len(absent)} of the {len(runs)} runs are not recorded. {Results(before, images).why_missing(absent[0])}."
            )
    records = all_records(planned, folder, images, place)
    return [_section(name, size, records[name], images) for name in names]


def rebuild(names: Sequence[str], size: Size, folder: Path) -> list[Section]:
    """The same sections from the records in `folder` alone: nothing is run, and no images are needed."""
    sections = []
    for name in names:
        file = file_of(folder, name)
        records = recording.read(file)
        results = Results(records, images_of(records))
        runs = MAKERS[name].planned(size)
        absent = missing(runs, results)
        if absent:
            raise InputError(
                f"{len(absent)} of the {len(runs)} runs of {name!r} are not recorded in {str(file)!r}. "
                f"{results.why_missing(absent[0])}. Leave out --recorded to run them."
            )
        wanted = {record.key: record for run in runs if (record := results.record(run)) is not None}
        sections.append(_section(name, size, list(wanted.values()), results.images))
    return sections


def _section(name: str, size: Size, records: list[Record], images: str | None) -> Section:
    section = MAKERS[name].section(size, Results(records, images))
    return replace(section, notes=[*section.notes, *_provenance(name, records)])


def _provenance(name: str, records: list[Record]) -> list[str]:
    """What made the runs behind a section, in a sentence or two."""
    if not records:
        return []
    groups: dict[str, int] = {}
    for record in records:
        groups[_made_by(record)] = groups.get(_made_by(record), 0) + 1
    return [f"Runs, in {name}/{recording.FILE}: " + "; ".join(f"{n} {words}" for words, n in groups.items()) + "."]


def _made_by(record: Record) -> str:
    if record.recorded_in is not None:
        since = record.recorded_in["commit"][:7]
        return f"kept in git since {since}, from before the commit, versions and device of a run were recorded"
    source = "outside a repository" if record.commit is None else f"at commit {record.commit[:7]}"
    changed = " with changes that were not committed" if record.dirty else ""
    versions = record.versions or {}
    used = ", ".join(
        f"{part} {versions[part]}" for part in ("dpfedexp", "torch", "numpy", "python") if part in versions
    )
    return f"made {source}{changed} on {record.device} with {used}"
