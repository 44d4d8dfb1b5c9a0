"""`dpfedexp demo`: the paper's synthetic experiments, in under a minute."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.errors import InputError


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the summary, the figure and the report.")] = Path("demo"),
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
) -> None:
    """DP-FedEXP beside DP-FedAvg and DP-SCAFFOLD on the paper's synthetic problem: what it gains, and what privacy it costs."""
    from dpfedexp.paper import demo as demonstration
    from dpfedexp.report import console as terminal
    from dpfedexp.report.folder import report
    from dpfedexp.report.write import save

    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(out)!r} can't be written: {error.strerror}.") from None
    done = demonstration.run(seeds)
    section = demonstration.section(done, f"dpfedexp demo --seeds {seeds}")
    console = terminal.wide()
    setup, *seen = section.text
    terminal.show(console, replace(section, text=[setup]))
    console.print(*seen, highlight=False)
    summary = out / "summary.json"
    demonstration.write_summary(done, summary)
    written = [summary, *save(section, out)]
    console.print("Written: " + ", ".join(f"[bold]{path}[/]" for path in written), highlight=False)
    console.print(f"Report: [bold]{report(out)}[/]", highlight=False)
