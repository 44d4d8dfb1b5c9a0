"""The two tables that the mutation run reads: which tests guard which file, and which changes are equivalent."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.operators import Mutant


class TableError(ValueError):
    """One sentence about a table, a file or an argument that does not fit."""


@dataclass(frozen=True)
class Equivalent:
    file: str
    line: str
    change: str
    reason: str


def read_guards(table: Path, package: Path, tests: Path) -> dict[str, list[Path]]:
    """{source file relative to the package: its test files}. Every file exists, and every source has a test file."""
    content = tomllib.loads(table.read_text())
    guards: dict[str, list[Path]] = {}
    for source, patterns in content["guards"].items():
        if not (package / source).is_file():
            raise TableError(
                f"{table.name} lists {source!r}, which does not exist in {package}; rename or remove its line."
            )
        found = {path for pattern in patterns for path in tests.glob(pattern)}
        if not found:
            raise TableError(f"{table.name} names {patterns} for {source!r}, but no test file in {tests} fits.")
        guards[source] = sorted(found)
    for folder in content.get("complete", []):
        for path in sorted((package / folder).glob("*.py")):
            name = str(path.relative_to(package))
            if path.name != "__init__.py" and name not in guards:
                raise TableError(
                    f"{table.name} does not list {name!r}; every file of {folder}/ needs the tests that guard it."
                )
    return guards


def choose(guards: dict[str, list[Path]], wanted: list[str]) -> dict[str, list[Path]]:
    """The lines of the table that were asked for by name or folder; all of them where nothing was."""
    if not wanted:
        return guards
    chosen: dict[str, list[Path]] = {}
    for name in wanted:
        fitting = {
            file: tests for file, tests in guards.items() if file == name or file.startswith(name.rstrip("/") + "/")
        }
        if not fitting:
            raise TableError(f"{name!r} is not in guards.toml; it lists {', '.join(guards)}.")
        chosen |= fitting
    return chosen


def read_equivalents(table: Path) -> dict[tuple[str, str, str], Equivalent]:
    entries = [Equivalent(**entry) for entry in tomllib.loads(table.read_text()).get("equivalent", [])]
    for entry in entries:
        if not entry.reason.strip():
            raise TableError(
                f"{table.name} gives no reason for {entry.change!r} in {entry.file}; an equivalent needs one."
            )
    return {(entry.file, entry.line, entry.change): entry for entry in entries}


def key_of(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.line, mutant.change


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """How many of `count` mutants each file gets: in proportion to how many it has, at least 3 (or all that it has)."""
    total = sum(sizes.values())
    return {file: min(size, max(3, round(count * size / total))) for file, size in sizes.items()} if total else {}
