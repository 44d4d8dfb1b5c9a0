"""What a mutation run shows: a bar while it runs, then the survivors and a table, and a file for other programs."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tests.mutation.run import Outcome
from tests.mutation.table import Equivalent


class Display:
    """A bar that is drawn by whoever waits, never by a thread of its own: a process with threads is not forked safely."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[survived]} survived"), auto_refresh=False)
        self._task = self._bar.add_task("tests as they are", total=total, survived=0)
        self._survived = self._ticks = 0

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.refresh()
        self._bar.stop()

    def tick(self) -> None:
        self._ticks += 1
        if self._ticks % 25 == 0:
            self._bar.refresh()

    def tell(self, outcome: Outcome) -> None:
        self._survived += outcome.verdict == "survived"
        self._bar.update(self._task, advance=1, survived=self._survived, description=outcome.mutant.file)


def counts(outcomes: list[Outcome]) -> dict[str, dict[str, int]]:
    """Per file: mutants, killed, survived, equivalent."""
    table: dict[str, dict[str, int]] = {}
    for outcome in outcomes:
        row = table.setdefault(outcome.mutant.file, {"mutants": 0, "killed": 0, "survived": 0, "equivalent": 0})
        row["mutants"] += 1
        row[outcome.verdict] += 1
    return table


def score(row: dict[str, int]) -> float:
    """Killed, of those that could be."""
    real = row["killed"] + row["survived"]
    return row["killed"] / real if real else 1.0


def print_result(outcomes: list[Outcome], unused: list[Equivalent], failing: dict[str, str], seconds: float) -> float:
    console = Console(highlight=False, width=132)
    for outcome in outcomes:
        if outcome.verdict == "survived":
            before, after = outcome.mutant.change.split(" → ", 1)
            where = f"{outcome.mutant.file}:{outcome.mutant.lines[0]}  ({outcome.mutant.operator})  {outcome.detail}"
            for text in (where, f"    {outcome.mutant.line}", f"  - {before}", f"  + {after}", ""):
                console.print(text, markup=False, soft_wrap=True)
    for entry in unused:
        console.print(
            f"equivalents.toml: no such change in {entry.file} any more: {entry.change}", markup=False, soft_wrap=True
        )
    for test, reason in failing.items():
        console.print(
            f"fails on the code as it is, so it judged nothing: {test}: {reason}", markup=False, soft_wrap=True
        )
    per_file = counts(outcomes)
    total = {
        name: sum(row[name] for row in per_file.values()) for name in ("mutants", "killed", "survived", "equivalent")
    }
    table = Table("file")
    for name in (*total, "score"):
        table.add_column(name, justify="right")
    for file, row in [*per_file.items(), ("all", total)]:
        if file == "all":
            table.add_section()
        table.add_row(file, *(str(value) for value in row.values()), f"{100 * score(row):.0f}%")
    console.print(table)
    run = [outcome.seconds for outcome in outcomes if outcome.seconds]
    console.print(
        f"{seconds / 60:.1f} minutes; {sum(run) / max(len(run), 1):.1f} s for each of {len(run)} mutants that were run"
    )
    return score(total)


def write_json(path: Path, outcomes: list[Outcome], failing: dict[str, str], total: float) -> None:
    rows = [
        {
            "file": outcome.mutant.file,
            "lines": outcome.mutant.lines,
            "operator": outcome.mutant.operator,
            "line": outcome.mutant.line,
            "change": outcome.mutant.change,
            "verdict": outcome.verdict,
            "detail": outcome.detail,
            "seconds": round(outcome.seconds, 2),
        }
        for outcome in outcomes
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {"score": total, "files": counts(outcomes), "failing": failing, "mutants": rows}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))
