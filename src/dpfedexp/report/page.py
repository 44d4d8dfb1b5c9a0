"""One self-contained HTML page: figures with values on hover, tables, privacy, configuration and commands. It loads nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from dpfedexp import __version__
from dpfedexp.files import replace_text
from dpfedexp.report import svg
from dpfedexp.report.document import Chart, Section

NUMERIC = re.compile(r"^[+\-−–~<>≈]?\s*\d|^–$|^diverged")
SHOWN_ROWS = 11


@dataclass(frozen=True)
class Page:
    title: str
    subtitle: str
    sections: Sequence[Section]
    command: str
    failed: str = ""


def render(page: Page, folder: Path | None = None) -> str:
    """The page as HTML. Files of figures that lie in `folder` are linked."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["numeric"] = lambda text: bool(NUMERIC.match(text))
    here = files("dpfedexp.report")
    template = environment.from_string((here / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(
        page=page,
        css=Markup((here / "page.css").read_text(encoding="utf-8")),
        js=Markup((here / "page.js").read_text(encoding="utf-8")),
        chart=svg.chart,
        legend=svg.legend,
        one_legend=_one_legend,
        excerpt=excerpt,
        links=lambda chart: _links(chart, folder),
        version=__version__,
    )


def write(page: Page, path: Path) -> Path:
    replace_text(path, render(page, path.parent))
    return path


def excerpt(chart: Chart) -> list[tuple[str, list[str], list[list[str]]]]:
    """The values of each panel as a small table, for readers without a pointer or a screen: title, columns, rows."""
    tables = []
    for panel in chart.panels:
        xs = sorted({x for s in panel.series for x in s.x})
        if len(xs) > SHOWN_ROWS:
            xs = [xs[round(i * (len(xs) - 1) / (SHOWN_ROWS - 1))] for i in range(SHOWN_ROWS)]
        at = [dict(zip(s.x, s.y, strict=True)) for s in panel.series]
        rows = [[f"{x:g}", *(f"{y[x]:z.4g}" if x in y else "–" for y in at)] for x in xs]
        tables.append((panel.title, [panel.x_label, *(s.name for s in panel.series)], rows))
    return tables


def _one_legend(chart: Chart) -> bool:
    """Whether all panels show the same series, so that one legend serves them."""
    return len({tuple((s.name, s.colour) for s in panel.series) for panel in chart.panels}) == 1


def _links(chart: Chart, folder: Path | None) -> list[str]:
    names = [f"{chart.name}.{suffix}" for suffix in ("png", "svg", "pdf")]
    return [name for name in names if folder is not None and (folder / name).is_file()]
