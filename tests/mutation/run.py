"""The mutation run: baseline, sample, one forked pytest per mutant, and what is known from an earlier run."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.mutation import forks
from tests.mutation.operators import Mutant, mutants, sample
from tests.mutation.plugins import Chosen, Reach
from tests.mutation.table import Equivalent, TableError, choose, key_of, read_equivalents, read_guards, shares

_STAGES = (0.3, 2.0)
"""Seconds: tests below the first run first, then those below the second, then the rest; within a stage file by file, so that a
file's fixtures are made at most once per stage."""


@dataclass(frozen=True)
class Project:
    """Where things are: the package under `root`/src, its tests under `root`/tests, the tables, and what a run remembers."""

    root: Path
    package: Path
    tables: Path
    state: Path

    @property
    def tests(self) -> Path:
        return self.root / "tests"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "killed" (with the test that did it), "survived", or "equivalent" (with the reason)."""

    mutant: Mutant
    verdict: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Plan:
    """The sampled mutants, and for every test file what its tests reach and how long they take.

    `failing` are the tests that fail on the code as it is, with the first line of the failure.
    """

    guards: dict[str, list[Path]]
    chosen: list[Mutant]
    equivalents: dict[tuple[str, str, str], Equivalent]
    unused: list[Equivalent]
    reach: dict[str, dict[str, Any]] = field(default_factory=dict)
    failing: dict[str, str] = field(default_factory=dict)

    def tests_of(self, mutant: Mutant) -> dict[str, float]:
        """{test: seconds}, the quickest stage first."""
        files = {str(path) for path in self.guards[mutant.file]}
        first, last = mutant.lines
        # A file of declarations alone has no line that a test could be seen to run, so all its tests are asked.
        declared = mutant.on_import and not any(record["lines"].get(mutant.file) for record in self.reach.values())
        found = []
        for test, record in self.reach.items():
            lines = record["lines"].get(mutant.file, [])
            reached = declared or (bool(lines) if mutant.on_import else any(first <= n <= last for n in lines))
            if record["file"] in files and reached and record["outcome"] == "passed":
                stage = sum(record["seconds"] > limit for limit in _STAGES)
                found.append((stage, record["file"], record["seconds"], test))
        return {test: seconds for _, _, seconds, test in sorted(found)}


def plan(project: Project, wanted: list[str], count: int | None, seed: int) -> Plan:
    guards = choose(read_guards(project.tables / "guards.toml", project.package, project.tests), wanted)
    equivalents = read_equivalents(project.tables / "equivalents.toml")
    everything = {file: mutants((project.package / file).read_text(), file) for file in guards}
    number = count or (40 * len(guards) if wanted else 300)
    each = shares({file: len(found) for file, found in everything.items()}, number)
    chosen = [mutant for file, found in everything.items() for mutant in sample(found, each[file], seed)]
    known = {key_of(mutant) for found in everything.values() for mutant in found}
    unused = [entry for key, entry in equivalents.items() if entry.file in guards and key not in known]
    return Plan(guards, chosen, equivalents, unused)


def measure(project: Project, made: Plan, places: list[forks.Slot], tick: Callable[[], None]) -> None:
    """Runs every guarding test file once on the package as it is, and fills `made.reach`.

    A test that fails then (tracing makes it slower than it allows itself to be) judges no mutant, which can only lower the score;
    it is in `made.failing`, and the result names it.
    """
    folder = project.state / "reach"
    folder.mkdir(parents=True, exist_ok=True)
    common = _digest([*sorted(project.package.rglob("*.py")), *_helpers(project)])
    failures: list[str] = []

    def jobs() -> Iterator[forks.Job]:
        for path in sorted({path for paths in made.guards.values() for path in paths}):
            kept = folder / f"{_digest([path])}-{common}.json"
            if kept.exists():
                add(path, kept)
                continue
            yield forks.Job(
                [path],
                lambda slot: Reach(slot.source / slot.package, slot.out),
                lambda slot: None,
                lambda slot, code, seconds, path=path, kept=kept: ended(path, kept, slot, code),
                limit=1200.0,
                stop=False,
            )

    def ended(path: Path, kept: Path, slot: forks.Slot, code: int) -> None:
        if code not in (0, 1, 5):
            failures.append(f"{path.relative_to(project.root)}:\n{slot.log.read_text()[-2000:]}")
            return
        kept.write_text(slot.out.read_text() or "{}")
        add(path, kept)
        if code == 1:
            kept.unlink()

    def add(path: Path, kept: Path) -> None:
        for test, record in json.loads(kept.read_text()).items():
            made.reach[test] = {**record, "file": str(path)}
            if record["outcome"] == "failed":
                made.failing[test] = record.get("reason", "")

    forks.run(jobs(), places, project.root, tick)
    if failures:
        raise TableError(
            "the tests do not pass on the code as it is, so they can't judge a mutant:\n" + "\n".join(failures)
        )


def judge(
    project: Project,
    made: Plan,
    places: list[forks.Slot],
    tick: Callable[[], None],
    tell: Callable[[Outcome], None],
) -> list[Outcome]:
    """Every chosen mutant against the tests that reach it.

    Outcomes are kept, and used again where nothing that they rest on has changed.
    """
    outcomes: list[Outcome] = []
    memory = _Memory(project, made)
    sources = {file: (project.package / file).read_text() for file in made.guards}

    def settle(outcome: Outcome) -> None:
        outcomes.append(outcome)
        tell(outcome)

    def jobs() -> Iterator[forks.Job]:
        for mutant in made.chosen:
            entry = made.equivalents.get(key_of(mutant))
            remembered = memory.find(mutant)
            tests = made.tests_of(mutant)
            if entry is not None:
                settle(Outcome(mutant, "equivalent", entry.reason))
            elif not tests:
                settle(Outcome(mutant, "survived", "no test reaches it"))
            elif remembered is not None:
                settle(remembered)
            else:
                yield job(mutant, tests)

    def job(mutant: Mutant, tests: dict[str, float]) -> forks.Job:
        files = sorted({Path(made.reach[test]["file"]) for test in tests})
        return forks.Job(
            files,
            lambda slot: Chosen(tests, slot.out),
            lambda slot: slot.write(mutant.file, mutant.apply(sources[mutant.file])),
            lambda slot, code, seconds: ended(mutant, slot, code, seconds),
            limit=60.0 + 10.0 * sum(tests.values()),
        )

    def ended(mutant: Mutant, slot: forks.Slot, code: int, seconds: float) -> None:
        slot.write(mutant.file, sources[mutant.file])
        if code in (5, 70, 71):
            raise TableError(
                f"pytest could not run for a mutant of {mutant.file} (code {code}):\n{slot.log.read_text()[-2000:]}"
            )
        killer = slot.out.read_text() or "at import"
        if code < 0:
            killer += " (time-out)" if code == forks.TIMED_OUT else f" (signal {-code})"
        outcome = Outcome(mutant, "killed" if code else "survived", killer if code else "", seconds)
        memory.add(outcome)
        settle(outcome)

    forks.run(jobs(), places, project.root, tick)
    order = {mutant.id: place for place, mutant in enumerate(made.chosen)}
    return sorted(outcomes, key=lambda outcome: order[outcome.mutant.id])


class _Memory:
    """Outcomes of earlier runs, one line each.

    A kill rests on the sources and on the test that did it; a survival on the sources and on all the tests.
    """

    def __init__(self, project: Project, made: Plan) -> None:
        self._path = project.state / "outcomes.jsonl"
        self._project, self._made = project, made
        self._common = _digest([*sorted(project.package.rglob("*.py")), *_helpers(project)])
        self._known: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                record = json.loads(line)
                self._known[record["id"]] = record

    def find(self, mutant: Mutant) -> Outcome | None:
        record = self._known.get(mutant.id)
        if (
            record is None
            or record["sources"] != self._common
            or record["tests"] != self._tests(mutant, record["detail"])
        ):
            return None
        return Outcome(mutant, record["verdict"], record["detail"], record["seconds"])

    def add(self, outcome: Outcome) -> None:
        record = {
            "id": outcome.mutant.id,
            "verdict": outcome.verdict,
            "detail": outcome.detail,
            "seconds": round(outcome.seconds, 2),
            "sources": self._common,
            "tests": self._tests(outcome.mutant, outcome.detail),
            "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
        }
        with open(self._path, "a") as file:
            file.write(json.dumps(record) + "\n")

    def _tests(self, mutant: Mutant, killer: str) -> str:
        killing = self._project.root / killer.split("::")[0]
        return _digest([killing] if "::" in killer and killing.exists() else self._made.guards[mutant.file])


def _helpers(project: Project) -> list[Path]:
    """Test code that several test files share."""
    return sorted(
        p for p in project.tests.rglob("*.py") if not p.name.startswith("test_") and p.parent.name != "mutation"
    )


def _digest(paths: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.name).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:20]
