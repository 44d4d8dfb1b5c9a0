"""Report sections: tables, charts and claims, for the terminal, the HTML page and JSON."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from dpfedexp.engine.plot import Chart, Panel, Series, draw, figure
from dpfedexp.errors import InputError
from dpfedexp.files import replace_text, writing

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Table:
    """A table of text; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


@dataclass(frozen=True)
class Claim:
    """An expected result, and the observed one."""

    text: str
    seen: str
    holds: bool


@dataclass(frozen=True, repr=False)
class Section:
    """One part of a report: print it for its text, and call `plot` for its charts.

    Args:
        command: the command that makes this section again.
        configuration: name of a run → its settings as TOML.
        privacy: name of a run → its privacy statement.
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

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            tree["tables"] = [Table(**table) for table in tree["tables"]]
            for chart in tree["charts"]:
                chart["panels"] = [
                    Panel(**{**panel, "series": [Series(**line) for line in panel["series"]]})
                    for panel in chart["panels"]
                ]
            tree["charts"] = [Chart(**chart) for chart in tree["charts"]]
            tree["claims"] = [Claim(**claim) for claim in tree["claims"]]
            return cls(**tree)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"the file {str(path)!r} is not a section of a report: {error}.") from None

    def save(self, folder: Path) -> list[Path]:
        """Write `<name>.json`, and every chart as PNG, SVG and PDF; return the paths."""
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{self.name}.json"
            replace_text(path, self.to_json())
            return [path, *(file for chart in self.charts for file in draw(chart, folder))]

    def plot(self) -> "Figure":
        """A matplotlib figure of the charts, with the legend below them; it needs no display."""
        return figure([panel for chart in self.charts for panel in chart.panels], legend_below=True)

    def __repr__(self) -> str:
        text = io.StringIO()
        # In a notebook, rich would display the output instead of writing it to the file.
        self.show(Console(file=text, width=140, color_system=None, force_jupyter=False))
        return text.getvalue()

    def show(self, console: Console) -> None:
        """Print the section, without its charts."""
        console.rule(f"[bold]{escape(self.title)}")
        for paragraph in self.text:
            console.print(escape(paragraph), highlight=False)
        for table in self.tables:
            shown = RichTable(title=escape(table.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
            for number, column in enumerate(table.columns):
                shown.add_column(escape(column), justify="left" if number < 2 else "right")
            for row in table.rows:
                shown.add_row(*map(escape, row))
            console.print(shown)
            if table.note:
                console.print(f"[dim]{escape(table.note)}[/]", highlight=False)
        for claim in self.claims:
            mark = "[green]✓[/]" if claim.holds else "[red]✗[/]"
            console.print(f"{mark} {escape(claim.text)}: [bold]{escape(claim.seen)}[/]", highlight=False)
        for note in self.notes:
            console.print(f"[dim]{escape(note)}[/]", highlight=False)


def wide() -> Console:
    """Return a console; it has 140 columns if the output is a file or a pipe, so that tables are not wrapped."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
