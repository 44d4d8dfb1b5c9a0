"""`dpfedexp report`: one page for any folder of results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def report(
    folder: Annotated[
        Path, typer.Argument(help="What `train`, `demo` or `paper` wrote, or a folder of runs.", show_default=False)
    ],
) -> None:
    """Write FOLDER/report.html: figures, tables, privacy, configuration and commands in one file that loads nothing."""
    from dpfedexp.report.folder import report as write_report

    Console().print(f"Wrote [bold]{write_report(folder)}[/].", highlight=False, soft_wrap=True)
