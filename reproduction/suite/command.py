"""What `suite` does: choose problems, make their runs, write the page; and `explore`, which shows its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

from dpfedexp.errors import InputError, nearest
from dpfedexp.files import replace_text
from dpfedexp.report.document import Section
from dpfedexp.report.page import report
from reproduction.explorer.explorer_page import render
from reproduction.suite import suite_page
from reproduction.suite import tables as preparing
from reproduction.suite.contenders import CONTENDERS
from reproduction.suite.problems import PROBLEMS
from reproduction.suite.suite_plan import QUICK, QUICK_PROBLEMS, Size, fingerprint
from reproduction.suite.suite_runs import Lines, Place, run_suite

Say = Callable[[str], None]


def size(quick: bool, seeds: int) -> Size:
    full = Size(seeds=seeds)
    return QUICK if quick else replace(full, headline_seeds=max(seeds, min(5, 2 * seeds - 1)))


def prepare(names: Sequence[str], folder: str | None, shakespeare: str | None) -> list[Path]:
    """Writes the named natural problems, or all of them, where they are not there yet."""
    chosen = [PROBLEMS[name].stored for name in check_names(names) or PROBLEMS]
    return preparing.prepare([stored for stored in chosen if stored is not None], folder, shakespeare)


def suite(names: Sequence[str], size: Size, place: Place, out: Path, recorded: bool, say: Say) -> Section:
    """The section that the page shows, written to `out` with its figures; runs are made first unless `recorded`.

    Args:
        names: problems; none for all of them, or for the quick ones where `size` is the quick one.
        size: how much is run.
        place: where runs are made.
        out: the folder of results.
        recorded: build from what is recorded; run nothing.
        say: hears a sentence about whatever is left out.
    """
    chosen = check_names(names) or list(QUICK_PROBLEMS if size == QUICK else PROBLEMS)
    if recorded:
        lines = Lines(out)
    else:
        for contender in CONTENDERS.values():
            if contender.why_missing:
                say(f"{contender.label} is left out: {contender.why_missing}")
        chosen = [name for name in chosen if is_there(name, place, say, asked=name in names)]
        lines, outcome = run_suite(chosen, size, out, place)
        for failure in outcome.failed:
            say(f"Failed, and not recorded: {failure}")
        if outcome.stopped:
            say("Stopped at the limit of time; the same command goes on from here.")
    made = suite_page.section(
        chosen, size, lines.result, "python -m reproduction suite" + (" --quick" if size == QUICK else "")
    )
    made.save(out)
    suite_page.write_markdown(made, out)
    report(out, title="DP-FedEXP on real federations", command=f"{made.command} --recorded --out {out}")
    return made


def explore(out: Path, folder: Path | None) -> Path:
    """Writes the explorer, one page, and returns its path.

    Args:
        out: the page.
        folder: results of `suite`; None for those that are recorded here.
    """
    results = files("reproduction.experiments") / "suite" if folder is None else folder
    with as_file(results / "suite.json") as path:
        section = Section.read(path)
    if not section.data.get("problems"):
        raise InputError(
            f"the folder {str(results)!r} has no results against ε; "
            f"`python -m reproduction suite --recorded --out {results}` writes them."
        )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        replace_text(out, render(section, "python -m reproduction explore"))
    except OSError as error:
        raise InputError(f"the page {str(out)!r} can't be written: {error.strerror}.") from None
    return out


def check_names(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in PROBLEMS:
            raise InputError(f"problems has {name!r}, which does not exist.{nearest(name, PROBLEMS)}")
    return list(dict.fromkeys(names))


def is_there(name: str, place: Place, say: Say, asked: bool) -> bool:
    """Whether the problem's data can be read; asked for by name, one that can't is an error."""
    try:
        fingerprint(PROBLEMS[name], place.folders)
    except InputError as error:
        if asked:
            raise
        say(f"{name} is left out: {error}")
        return False
    return True
