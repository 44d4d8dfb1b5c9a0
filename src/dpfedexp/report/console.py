"""A section in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from dpfedexp.report.document import Section


def wide() -> Console:
    """The terminal; 140 columns where the output goes to a file or a pipe, so that tables stay whole."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def show(console: Console, section: Section) -> None:
    console.rule(f"[bold]{escape(section.title)}")
    for paragraph in section.text:
        console.print(escape(paragraph), highlight=False)
    for table in section.tables:
        console.print(_rich(table.title, table.columns, table.rows))
        if table.note:
            console.print(f"[dim]{escape(table.note)}[/]", highlight=False)
    for claim in section.claims:
        mark = "[green]✓[/]" if claim.holds else "[red]✗[/]"
        console.print(f"{mark} {escape(claim.text)}: [bold]{escape(claim.seen)}[/]", highlight=False)
    for note in section.notes:
        console.print(f"[dim]{escape(note)}[/]", highlight=False)


def _rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> RichTable:
    table = RichTable(title=escape(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(escape(column), justify="left" if number < 2 else "right")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table
