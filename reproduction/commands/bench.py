"""`python -m reproduction bench`: seconds and bytes per round on this machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from dpfedexp.errors import InputError

if TYPE_CHECKING:
    from reproduction.benchmarks.measure import Row


def bench(
    workload: Annotated[
        list[str] | None, typer.Option(help="cnn, mlp, resnet, lstm, …, or all; may be repeated.")
    ] = None,
    clients: Annotated[int, typer.Option(min=1, help="Clients in the round.")] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds measured after a warm-up; the best counts.")] = 2,
    passes: Annotated[
        int, typer.Option(min=1, help="Times that everything is measured, in turn; the fastest counts.")
    ] = 1,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "fp32",
    trainer: Annotated[list[str] | None, typer.Option(help="auto by default; may be repeated.")] = None,
    secure: Annotated[
        bool, typer.Option("--secure", help="Measure a secure run too, whose clients are kept apart.")
    ] = False,
    loop: Annotated[bool, typer.Option(help="Measure the plain PyTorch loop too.")] = True,
    parts: Annotated[bool, typer.Option(help="Measure PrivUnit and the accountant too.")] = True,
    json_: Annotated[bool, typer.Option("--json", help="Print the rounds as a JSON list and nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write everything as JSON to this file.")] = None,
) -> None:
    """Time one round of many clients beside the plain PyTorch loop, each in a process of its own."""
    from dpfedexp.trainers.select import check_trainer
    from reproduction.benchmarks.measure import measure
    from reproduction.benchmarks.workloads import WORKLOADS
    from reproduction.benchmarks.workloads import workload as check_workload

    names = list(WORKLOADS) if workload == ["all"] else workload or ["cnn"]
    for name in names:
        check_workload(name)
    for how in trainer or []:
        check_trainer(how)
    ours = {"rounds": rounds, "device": device, "precision": precision}
    asked: list[tuple[str, str, dict[str, Any]]] = []
    for name in names:
        asked += [("dpfedexp", name, {"trainer": how, **ours}) for how in trainer or ["auto"]]
        if secure:
            asked.append(("dpfedexp", name, {**ours, "secure": True}))
        if loop:
            asked.append(("plain loop", name, {"rounds": 1, "device": device}))
    best: dict[int, Row] = {}
    left_out: set[int] = set()
    _write(out, None)
    console = Console(stderr=True)
    # Pass by pass, so that a machine that is busy for a while is so for all of them.
    for number in track([*range(len(asked))] * passes, "measuring", console=console, transient=True):
        system, name, options = asked[number]
        if number in left_out:
            continue
        try:
            row = measure(system, name, clients, **options)
        except InputError as reason:
            # A network that one trainer can't take is no reason to lose what the others take.
            if len(asked) == 1 or options.get("trainer", "auto") == "auto":
                raise
            left_out.add(number)
            console.print(f"[yellow]Left out:[/] {escape(str(reason))}", highlight=False, soft_wrap=True)
            continue
        if number not in best or row.seconds_per_round < best[number].seconds_per_round:
            best[number] = row
            _write(out, _listed(best))
    if not best:
        raise InputError("nothing was measured: no network has any of these trainers.")
    found = _listed(best)
    if parts and not json_:
        # Imported here because dp-accounting takes a second to import, which every other command would pay.
        from reproduction.benchmarks import components

        found |= {"privunit": components.privunit(), "accounting": components.accounting()}
    _write(out, found)
    if json_:
        typer.echo(json.dumps(found["rounds"]))
        return
    _print(Console(), [best[number] for number in sorted(best)], found)


def _listed(rows: dict[int, Row]) -> dict[str, object]:
    return {"rounds": [asdict(rows[number]) for number in sorted(rows)]}


def _write(out: Path | None, found: dict[str, object] | None) -> None:
    """After every measurement, so that one that is stopped loses nothing; before the first, None tries whether it can be."""
    if out is None:
        return
    try:
        if found is None:
            out.open("a").close()
        else:
            out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InputError(f"the file {str(out)!r} can't be written: {error.strerror}.") from None


def _print(console: Console, rows: list[Row], found: dict[str, object]) -> None:
    cells = []
    for row in rows:
        seconds = (f"{row.seconds_per_round:.3g}", f"{row.cpu_seconds_per_round:.3g}")
        size = (f"{row.cohort}", f"{row.parameters:,}")
        system = row.system.replace("trainer ", "").replace("precision ", "").replace("secure True", "secure")
        cells.append((system, row.trainer, row.workload, *size, *seconds, f"{row.peak_memory_bytes / 1e6:.0f}"))
    table = Table(box=None)
    words, numbers = ("system", "trainer", "workload"), ("clients", "parameters", "s/round", "CPU s/round", "peak MB")
    for place, title in enumerate((*words, *numbers)):
        # In a narrow window names are folded; a number that is cut off would be another number.
        longest = max((len(line[place]) for line in cells), default=0)
        table.add_column(
            title,
            overflow="fold",
            min_width=None if title in words else longest,
            justify="left" if title in words else "right",
        )
    for line in cells:
        table.add_row(*line)
    console.print(table)
    if isinstance(drawn := found.get("privunit"), dict):
        console.print(
            f"PrivUnit at d = {drawn['dimension']:,}: {drawn['privunit_ms']:.1f} ms per vector, {drawn['times_gaussian']:.2f} "
            f"times its Gaussian alone, {drawn['times_faster_than_rejection']:.0f} times faster than rejection.",
            highlight=False,
        )
    if isinstance(account := found.get("accounting"), dict):
        console.print(
            f"ε of {account['rounds']} rounds: {account['ours_ms']:.2f} ms, dp-accounting {account['dp_accounting_ms']:.0f} ms.",
            highlight=False,
        )
