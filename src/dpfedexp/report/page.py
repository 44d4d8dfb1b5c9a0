"""From a folder of results to one self-contained HTML page: of a run, of several, or of saved sections."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dpfedexp import __version__
from dpfedexp.engine.outlets import METRICS, REPORT
from dpfedexp.engine.plot import FORMATS, Panel, draw
from dpfedexp.errors import InputError
from dpfedexp.files import finite, replace_text
from dpfedexp.report.document import Section
from dpfedexp.report.runs import is_run, read_run, run_section, runs_section

NUMERIC = re.compile(r"^[+\-−–~<>≈]?\s*\d|^–$|^diverged")
SHOWN_ROWS = 11
HEADS = {
    "demo": ("DP-FedEXP at a glance", "Client-level private federated learning whose server step size sets itself."),
    "sweep": ("A sweep", "Many settings on the same clients, and what trying them costs."),
}
"""Title and subtitle of a page with this one section."""


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    sections: Sequence[Section]
    failed: str = ""
    command: str = ""


def report(folder: Path, *, title: str = "", order: Sequence[str] = (), command: str = "") -> Path:
    """Writes `folder/report.html` and returns its path.

    Args:
        folder: of a run, of several, or of saved sections.
        title: of a page of saved sections; by default what made them, or the folder's name.
        order: names of saved sections that come first, in this order.
        command: what writes the page again.
    """
    if not folder.is_dir():
        raise InputError(f"the folder {str(folder)!r} does not exist; name one that a run, a demo or `paper` wrote.")
    page = _page(folder, title, order)
    try:
        replace_text(folder / REPORT, render(replace(page, command=command or f"dpfedexp report {folder}"), folder))
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None
    return folder / REPORT


def render(page: Page, folder: Path) -> str:
    """The page as HTML. Files of figures that lie in `folder` are linked."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["numeric"] = lambda text: bool(NUMERIC.match(text))
    here = files("dpfedexp.report")
    template, css, *js = (
        (here / name).read_text(encoding="utf-8") for name in ("page.html.j2", "page.css", "chart.js", "page.js")
    )

    def panel_json(panel: Panel) -> str:
        """What the page's script draws; numbers that are not finite are null."""
        return json.dumps(finite({**asdict(panel), "slots": panel.slots}), ensure_ascii=False)

    return environment.from_string(template).render(
        page=page,
        css=Markup(css),
        js=Markup("\n".join(js)),
        panel_json=panel_json,
        one_legend=lambda chart: len({tuple((s.name, s.colour) for s in p.series) for p in chart.panels}) == 1,
        excerpt=excerpt,
        links=lambda chart: [name for name in (f"{chart.name}.{f}" for f in FORMATS) if (folder / name).is_file()],
        version=__version__,
    )


def excerpt(panel: Panel) -> tuple[list[str], list[list[str]]]:
    """The values of a panel as a small table, for readers without a pointer or a screen: columns, rows."""
    xs = sorted({x for s in panel.series for x in s.x})
    if len(xs) > SHOWN_ROWS:
        xs = [xs[round(i * (len(xs) - 1) / (SHOWN_ROWS - 1))] for i in range(SHOWN_ROWS)]
    at = [dict(zip(s.x, s.y, strict=True)) for s in panel.series]
    rows = [[f"{x:g}", *(f"{y[x]:z.4g}" if x in y else "–" for y in at)] for x in xs]
    return [panel.x_label, *(s.name for s in panel.series)], rows


def _page(folder: Path, title: str, order: Sequence[str]) -> Page:
    name = folder.resolve().name
    if saved := saved_sections(folder, order):
        head = HEADS.get(saved[0].name) if len(saved) == 1 else None
        usual, subtitle = head or (name, HEADS["demo"][1])
        return Page(title or usual, subtitle, saved)
    if is_run(folder):
        run = read_run(folder)
        section = run_section(run)
        for chart in section.charts:
            draw(chart, folder)
        section = replace(section, title="What was measured", text=section.text[bool(run.failure) :])
        what = run.title() or f"A run of dpfedexp: {len(run.history)} rounds."
        return Page(run.name, what, [section], run.failure or "")
    runs = [read_run(path) for path in sorted(folder.iterdir()) if path.is_dir() and is_run(path)]
    if not runs:
        raise InputError(
            f"the folder {str(folder)!r} holds no results: no {METRICS} of a run, no folders of runs, no sections of `paper`."
        )
    sections = [runs_section(runs), *(run_section(run, f"run-{number}") for number, run in enumerate(runs, 1))]
    for chart in sections[0].charts:
        draw(chart, folder)
    return Page(name, f"{len(runs)} runs of dpfedexp.", sections)


def saved_sections(folder: Path, order: Sequence[str] = ()) -> list[Section]:
    """The sections that a command left in a folder as JSON: those in `order` first, the others by name."""
    sections = [Section.read(path) for path in sorted(folder.glob("*.json")) if _is_section(path)]
    first = {name: number for number, name in enumerate(order)}
    return sorted(sections, key=lambda section: first.get(section.name, len(first)))


def _is_section(path: Path) -> bool:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(tree, dict) and {"name", "title", "tables", "charts", "claims"} <= tree.keys()
