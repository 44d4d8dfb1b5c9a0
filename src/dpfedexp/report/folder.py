"""From a folder of results to its page, whatever made the folder: the paper, the demo, one run or a sweep of runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from dpfedexp.engine.outlets import METRICS, REPORT
from dpfedexp.errors import InputError
from dpfedexp.report.document import Section
from dpfedexp.report.figures import draw
from dpfedexp.report.page import Page, write
from dpfedexp.report.runs import is_run, read_run, run_section, sweep_section

ORDER = ("demo", "table1", "synthetic", "mnist", "step-size", "step-history", "grid", "beyond", "suite")
REPRODUCED = "DP-FedEXP, reproduced"
TITLES = {"demo": "DP-FedEXP at a glance", "suite": "DP-FedEXP on real federations", "sweep": "A sweep"}
"""Of pages that have this one section."""


def report(folder: Path) -> Path:
    """Writes `folder/report.html` and returns its path."""
    if not folder.is_dir():
        raise InputError(f"the folder {str(folder)!r} does not exist; name one that a run, a demo or `paper` wrote.")
    command = f"dpfedexp report {folder}"
    try:
        return write(_page(folder, command), folder / REPORT)
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None


def _page(folder: Path, command: str) -> Page:
    if saved := saved_sections(folder):
        title = TITLES.get(saved[0].name, REPRODUCED) if len(saved) == 1 else REPRODUCED
        subtitle = "Client-level private federated learning whose server step size sets itself."
        if [section.name for section in saved] == ["sweep"]:
            subtitle = "Many settings on the same clients, and what trying them costs."
        return Page(title, subtitle, saved, command)
    if is_run(folder):
        run = read_run(folder)
        section = replace(run_section(run), title="What was measured")
        _draw(section, folder)
        what = run.header.text or f"A run of dpfedexp: {len(run.history)} rounds."
        return Page(
            run.name, what, [replace(section, text=section.text[bool(run.failure) :])], command, run.failure or ""
        )
    runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)]
    if not runs:
        raise InputError(
            f"the folder {str(folder)!r} holds no results: no {METRICS} of a run, no folders of runs, no sections of `paper`."
        )
    sections = [sweep_section(runs), *(run_section(run, f"run-{number}") for number, run in enumerate(runs, 1))]
    _draw(sections[0], folder)
    return Page(folder.resolve().name, f"{len(runs)} runs of dpfedexp.", sections, command)


def saved_sections(folder: Path) -> list[Section]:
    """The sections that `paper` and `demo` left as JSON, in the paper's order."""
    sections = [Section.read(path) for path in sorted(folder.glob("*.json")) if _is_section(path)]
    order = {name: number for number, name in enumerate(ORDER)}
    return sorted(sections, key=lambda section: order.get(section.name, len(order)))


def _is_section(path: Path) -> bool:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and {"name", "title", "tables", "charts", "claims"} <= tree.keys()


def _draw(section: Section, folder: Path) -> None:
    for chart in section.charts:
        draw(chart, folder)
