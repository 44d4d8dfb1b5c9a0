"""What a result says, apart from how it is shown: sections of tables, charts and claims for the terminal, the page and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dpfedexp.errors import InputError


@dataclass(frozen=True)
class Table:
    """Cells are text as it is shown; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Series:
    """A line, with an optional band or error bar from `low` to `high`; `colour` names an algorithm's colour."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    colour: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Chart:
    """`name` is the stem of its files."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Claim:
    """Something that ought to be seen, and what was seen."""

    text: str
    seen: str
    holds: bool


@dataclass(frozen=True)
class Section:
    """One part of a report.

    Args:
        command: what makes this section again.
        configuration: name → TOML of the runs behind it.
        privacy: name → the privacy statement of those runs.
        data: the numbers behind the tables, for programs.
    """

    name: str
    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()
    command: str = ""
    configuration: dict[str, str] = field(default_factory=dict)
    privacy: dict[str, str] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> Section:
        tree = json.loads(text)
        tree["tables"] = [Table(**table) for table in tree["tables"]]
        tree["charts"] = [_chart(chart) for chart in tree["charts"]]
        tree["claims"] = [Claim(**claim) for claim in tree["claims"]]
        return Section(**tree)

    @staticmethod
    def read(path: Path) -> Section:
        try:
            return Section.from_json(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"the file {str(path)!r} is not a section of a report: {error}.") from None


def _chart(tree: dict[str, Any]) -> Chart:
    panels = [Panel(**{**panel, "series": [Series(**line) for line in panel["series"]]}) for panel in tree["panels"]]
    return Chart(**{**tree, "panels": panels})
