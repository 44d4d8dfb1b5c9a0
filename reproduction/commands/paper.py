"""`python -m reproduction paper`: the paper's tables and figures, and what goes beyond them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from reproduction.paper import PRINTED_AS, SECTIONS

SectionName = StrEnum("SectionName", [(name, name) for name in (*SECTIONS, *PRINTED_AS)])  # type: ignore[misc]


class Problem(StrEnum):
    synthetic = "synthetic"
    mnist = "mnist"


def paper(
    part: Annotated[SectionName, typer.Argument(help="Which part of the paper.", show_default=False)],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 5,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small runs with the same shape of results, in minutes.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 … [default: cuda if there is one]", show_default=False)
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Folder with MNIST's four files, or another set in their place.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs side by side [default: one to a core, one on a GPU]", show_default=False),
    ] = None,
    problem: Annotated[
        Problem | None, typer.Option(help="Only the runs of this problem, in grid, step-history and beyond.")
    ] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Rebuild from the recorded runs in the folder; run nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("paper-results"),
) -> None:
    """Reproduce the paper: every number beside the printed one, with the runs behind it recorded and never repeated.

    A run is recorded in OUT/<section>/runs.jsonl with all of its settings, and made again only if one of them differs.
    """
    from dpfedexp.report.document import wide
    from reproduction.paper import sections
    from reproduction.paper.results.planned import Place
    from reproduction.paper.results.size import Size

    chosen = PRINTED_AS.get(str(part), (str(part),))
    size = Size(min(seeds, sections.QUICK_SEEDS) if quick else seeds, quick, problem and str(problem))
    console = wide()
    if recorded:
        made = sections.rebuild(chosen, size, out)
    else:
        made = sections.make(chosen, size, Place(device, data, jobs), out, lambda text: typer.echo(text, err=True))
    for section in made:
        section.show(console)
        written = section.save(out)
        console.print("Written: " + ", ".join(f"[bold]{path}[/]" for path in written), highlight=False)
    console.print(f"Report: [bold]{sections.write_page(out)}[/]", highlight=False)
