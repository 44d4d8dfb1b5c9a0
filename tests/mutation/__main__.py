"""`python -m tests.mutation`: how many wrong changes of the privacy-relevant files the tests notice.

torch and SciPy are imported once, every mutant runs in a forked copy of that process, meets only the tests that reach its line,
quickest first, and the first failure ends it. cosmic-ray 8.7 has no operator that leaves out a statement (a check, a charge) or a
term, the mistakes that matter most here; mutmut was not tried.
"""

import argparse
import contextlib
import json
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mutation.forks import Job, run
from tests.mutation.operators import Mutant, mutants, sample

ENOUGH = 0.95
_STAGES = (0.3, 2.0)
"""Seconds: tests below the first run first, then those below the second, then the rest; within a stage file by file, so that a
file's fixtures are made at most once per stage."""
Guards = dict[str, list[Path]]


class TableError(ValueError):
    """One sentence about a table, a file or an argument that does not fit."""


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: "killed" (with the test that did it), "survived", or "equivalent" (with the reason)."""

    mutant: Mutant
    verdict: str
    detail: str = ""
    seconds: float = 0.0


def read_guards(table: Path, package: Path, tests: Path) -> Guards:
    """{source file relative to the package: its test files}. Every file exists, and every source has a test file."""
    content = tomllib.loads(table.read_text())
    guards: Guards = {}
    for source, patterns in content["guards"].items():
        if not (package / source).is_file():
            raise TableError(
                f"{table.name} lists {source!r}, which does not exist in {package}; rename or remove its line."
            )
        guards[source] = sorted({path for pattern in patterns for path in tests.glob(pattern)})
        if not guards[source]:
            raise TableError(f"{table.name} names {patterns} for {source!r}, but no test file in {tests} fits.")
    for folder in content.get("complete", []):
        for name in sorted(str(path.relative_to(package)) for path in (package / folder).glob("*.py")):
            if not name.endswith("__init__.py") and name not in guards:
                raise TableError(
                    f"{table.name} does not list {name!r}; every file of {folder}/ needs the tests that guard it."
                )
    return guards


def choose(guards: Guards, wanted: list[str]) -> Guards:
    """The lines of the table that were asked for by name or folder; all of them where nothing was."""
    for name in wanted:
        if not any(_within(file, name) for file in guards):
            raise TableError(f"{name!r} is not in guards.toml; it lists {', '.join(guards)}.")
    return {file: tests for file, tests in guards.items() if not wanted or any(_within(file, name) for name in wanted)}


def _within(file: str, name: str) -> bool:
    return file == name or file.startswith(name.rstrip("/") + "/")


def read_equivalents(table: Path) -> dict[tuple[str, str, str], str]:
    """{(file, line, change): reason} of the changes that no test can notice."""
    entries = tomllib.loads(table.read_text()).get("equivalent", [])
    for entry in entries:
        if not entry["reason"].strip():
            raise TableError(f"{table.name} gives no reason for {entry['change']!r} in {entry['file']}; it needs one.")
    return {(entry["file"], entry["line"], entry["change"]): entry["reason"] for entry in entries}


def shares(sizes: dict[str, int], count: int) -> dict[str, int]:
    """How many of `count` mutants each file gets: in proportion to how many it has, at least 3 (or all that it has)."""
    total = sum(sizes.values())
    return {file: min(size, max(3, round(count * size / total))) for file, size in sizes.items()} if total else {}


def reach(guards: Guards, root: Path, package: Path, workers: int) -> dict[str, dict[str, Any]]:
    """Every guarding test, run once on the package as it is: its file, outcome, seconds and the lines that it runs.

    A test that fails then judges no mutant, which can only lower the score.
    """
    jobs = [Job((path,)) for path in sorted({path for paths in guards.values() for path in paths})]
    tests: dict[str, dict[str, Any]] = {}
    with contextlib.closing(run(jobs, root, package, workers)) as ended:
        for number, one in enumerate(ended, 1):
            (path,) = one.job.files
            if one.code not in (0, 1, 5):
                raise TableError(
                    f"{path} does not run on the code as it is, so it can't judge a mutant:\n{one.log[-2000:]}"
                )
            tests |= {test: record | {"file": path} for test, record in json.loads(one.wrote).items()}
            _show(f"tests as they are: {number} of {len(jobs)} files")
    return tests


def judge(
    chosen: list[Mutant], guards: Guards, equivalents: dict[Any, str], tests: dict[str, Any], *where: Any
) -> list[Outcome]:
    """Every chosen mutant against the tests that reach it; `where` is what `run` takes after its jobs."""
    outcomes: list[Outcome] = []

    def jobs() -> Iterator[Job]:
        for mutant in chosen:
            asked = tests_of(mutant, guards, tests)
            if reason := equivalents.get((mutant.file, mutant.line, mutant.change)):
                outcomes.append(Outcome(mutant, "equivalent", reason))
            elif not asked:
                outcomes.append(Outcome(mutant, "survived", "no test reaches it"))
            else:
                yield Job(tuple(sorted({tests[test]["file"] for test in asked})), mutant, asked)

    with contextlib.closing(run(jobs(), *where)) as ended:
        for one in ended:
            mutant = one.job.mutant
            if one.code in (5, 70, 71):
                raise TableError(f"pytest failed for a mutant of {mutant.file} (code {one.code}):\n{one.log[-2000:]}")
            by = {0: "", -signal.SIGALRM: " (time-out)"}.get(min(0, one.code), f" (signal {-one.code})")
            detail = (one.wrote or "at import") + by if one.code else ""
            outcomes.append(Outcome(mutant, "killed" if one.code else "survived", detail, round(one.seconds, 2)))
            survived = sum(outcome.verdict == "survived" for outcome in outcomes)
            _show(f"{len(outcomes)} of {len(chosen)} mutants, {survived} survived")
    return sorted(outcomes, key=lambda outcome: chosen.index(outcome.mutant))


def tests_of(mutant: Mutant, guards: Guards, tests: dict[str, Any]) -> dict[str, float]:
    """{test: seconds} of the tests that reach a mutant, the quickest stage first."""
    first, last = mutant.lines
    found = []
    for test, record in tests.items():
        lines = record["lines"].get(mutant.file, [])
        # Another file may use what an import defines, such as a constant, so all tests are asked.
        reached = mutant.on_import or any(first <= n <= last for n in lines)
        if record["file"] in guards[mutant.file] and reached and record["outcome"] == "passed":
            stage = sum(record["seconds"] > limit for limit in _STAGES)
            found.append((stage, record["file"], record["seconds"], test))
    return {test: seconds for _, _, seconds, test in sorted(found)}


def report(outcomes: list[Outcome], unused: list[tuple[str, str, str]], failing: dict[str, str], path: Path) -> float:
    """Prints survivors and counts, writes both to `path`, and returns the share that was killed of those that could be."""
    files: dict[str, Counter[str]] = {"all": Counter()}
    for outcome in outcomes:
        mutant = outcome.mutant
        for name in (mutant.file, "all"):
            files.setdefault(name, Counter()).update(["mutants", outcome.verdict])
        if outcome.verdict == "survived":
            before, after = mutant.change.split(" → ", 1)
            print(f"{mutant.file}:{mutant.lines[0]}  ({mutant.operator})  {outcome.detail}\n    {mutant.line}")
            print(f"  - {before}\n  + {after}\n")
    for file, _, change in unused:
        print(f"equivalents.toml: no such change in {file} any more: {change}")
    for test, reason in failing.items():
        print(f"fails on the code as it is, so it judged nothing: {test}: {reason}")
    kinds = ("mutants", "killed", "survived", "equivalent")
    print(f"{'file':44}" + "".join(f"{kind:>12}" for kind in (*kinds, "score")))
    for name, row in [*list(files.items())[1:], ("all", files["all"])]:
        score = row["killed"] / real if (real := row["killed"] + row["survived"]) else 1.0
        print(f"{name:44}" + "".join(f"{row[kind]:12}" for kind in kinds) + f"{score:12.0%}")
    rows = [
        {key: getattr(outcome.mutant, key) for key in ("file", "lines", "operator", "line", "change")}
        | {"verdict": outcome.verdict, "detail": outcome.detail, "seconds": outcome.seconds}
        for outcome in outcomes
    ]
    counts = {name: {kind: row[kind] for kind in kinds} for name, row in files.items() if name != "all"}
    content = {"score": score, "files": counts, "failing": failing, "mutants": rows}
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False))
    return score


def main(arguments: list[str] | None = None) -> int:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "files", nargs="*", help="files or folders of the package; all that guards.toml lists by default"
    )
    parser.add_argument("--count", type=int, help="mutants in all (300; 40 for every named file)")
    parser.add_argument("--seed", type=int, default=0, help="another sample")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--root", type=Path, default=here.parent.parent, help="the folder that holds src and tests")
    parser.add_argument("--package", default="dpfedexp")
    parser.add_argument(
        "--tables", type=Path, default=here, help="the folder that holds guards.toml and equivalents.toml"
    )
    given = parser.parse_args(arguments)
    began = time.monotonic()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # running copies are ended on the way
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background starts its programs deaf to it
    try:
        root, tables = given.root.resolve(), given.tables.resolve()
        package, state = root / "src" / given.package, root / "build" / "mutants"
        state.mkdir(parents=True, exist_ok=True)
        guards = choose(read_guards(tables / "guards.toml", package, root / "tests"), given.files)
        equivalents = read_equivalents(tables / "equivalents.toml")
        everything = {file: mutants((package / file).read_text(), file) for file in guards}
        number = given.count or (40 * len(guards) if given.files else 300)
        each = shares({file: len(found) for file, found in everything.items()}, number)
        chosen = [mutant for file, found in everything.items() for mutant in sample(found, each[file], given.seed)]
        tests = reach(guards, root, package, given.workers)
        outcomes = judge(chosen, guards, equivalents, tests, root, package, given.workers)
    except TableError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    known = {(mutant.file, mutant.line, mutant.change) for found in everything.values() for mutant in found}
    unused = [key for key in equivalents if key[0] in guards and key not in known]
    failing = {test: record.get("reason", "") for test, record in tests.items() if record["outcome"] == "failed"}
    score = report(outcomes, unused, failing, state / "result.json")
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if score >= ENOUGH else 1


def _show(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
