"""`dpfedexp sweep`: train with many settings, and report what trying them costs."""

from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.cli.options import DataOption, SetOption
from dpfedexp.cli.train import command_line


def sweep(
    file: Annotated[Path, typer.Argument(help="The runs' TOML file; `dpfedexp init` writes one.", show_default=False)],
    grid: Annotated[
        list[str] | None,
        typer.Option(
            "--grid", metavar="KEY=A,B,C", help="A setting and its values; several of them make all combinations."
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every combination.")] = 1,
    set_: SetOption = None,
    out: Annotated[Path, typer.Option(help="Folder for the runs and the page.")] = Path("sweep-results"),
    data: DataOption = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs side by side; by default one to a core.", show_default=False)
    ] = None,
    select: Annotated[
        str | None,
        typer.Option(metavar="METRIC", help="Rank by this metric of the server's own test set.", show_default=False),
    ] = None,
) -> None:
    """Train with many settings, and report results and the total ε. An interrupted sweep continues with the same command.

    Every run is a folder of OUT, as `dpfedexp train` leaves it.
    """
    from dpfedexp.cli.trials import Sweep, run_trials, section, trials
    from dpfedexp.report.document import wide
    from dpfedexp.report.page import report

    plan = Sweep(file, out, tuple(set_ or ()), data, jobs)
    planned = trials(grid or (), seeds)
    first = plan.settings(planned[0])
    first.check()
    delta = first.algorithm.delta if first.algorithm.delta is not None else 1e-5
    console = wide()
    failed = run_trials(plan, planned)
    made = section(plan, planned, failed, select, delta, command_line())
    made.save(out)
    page = report(out)
    made.show(console)
    console.print(f"Written: [bold]{page}[/]", highlight=False)
    if failed:
        raise typer.Exit(3)
