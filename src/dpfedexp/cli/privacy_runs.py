"""`dpfedexp privacy explain | verify`: what was promised, and whether it is true."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from dpfedexp.cli.options import JsonOption, print_json

if TYPE_CHECKING:
    from dpfedexp.accounting import Event

INCOMPLETE = 4
"""The exit code where a claim can't be checked, because something is missing."""
_VERDICTS = {
    "holds": "[bold green]The claim holds.[/]",
    "false": "[bold red]THE CLAIM DOES NOT HOLD. Do not rely on it.[/]",
    "incomplete": "[bold yellow]The claim can't be checked: what is missing stands above. Do not rely on it until it is there.[/]",
}
RunArgument = Annotated[Path, typer.Argument(help="The folder of a run.")]


def explain(run: RunArgument, as_json: JsonOption = False) -> None:
    """What did a run promise, in plain language? Computed from its ledger."""
    from dpfedexp.accounting.wording import wrap
    from dpfedexp.engine.verify import read_claim, recompute

    statement = recompute(run, read_claim(run))
    typer.echo(statement.to_json() if as_json else wrap(statement.text, min(Console().width, 120)))


def verify(run: RunArgument, as_json: JsonOption = False) -> None:
    """Is a run's claim true? Recomputes it from ledger and configuration; exit code 1: it is not, 4: something is missing."""
    from dpfedexp.engine.verify import outcome, read_claim, recompute, verify_run

    events, unplanned = _planned_events(run)
    planned = events[0] if events else None
    checks = verify_run(run, planned, events[1:])
    result = outcome(checks)
    if as_json:
        # Without a whole ledger there is nothing to recompute, and the checks say so.
        found = json.loads(recompute(run, read_claim(run)).to_json()) if checks[0].passed else {}
        keys = ("epsilon_total", "epsilon_round", "delta", "adjacency", "accountant", "rounds", "exact")
        print_json(
            {
                "verified": result == "holds",
                "outcome": result,
                **{key: found.get(key) for key in keys},
                "checks": [dataclasses.asdict(check) for check in checks],
                "configuration_checked": planned is not None,
            }
        )
    else:
        table = Table("check", "result", "detail", title=f"Verification of {run}")
        for check in checks:
            word = (
                "[green]ok[/]" if check.passed else "[yellow]missing[/]" if check.incomplete else "[bold red]FAILED[/]"
            )
            table.add_row(check.name, word, check.detail)
        if planned is None:
            table.add_row("configuration", "[yellow]not checked[/]", unplanned)
        console = Console()
        console.print(table)
        console.print(_VERDICTS[result])
    if result != "holds":
        raise typer.Exit(1 if result == "false" else INCOMPLETE)


def _planned_events(run: Path) -> tuple[list[Event], str]:
    """The event of one round by the run's own configuration and those before the first; without any, why they are not known."""
    from dpfedexp.config import load
    from dpfedexp.engine.outlets import CONFIG

    path = run / CONFIG
    if not path.exists():
        return [], f"the run has no {CONFIG}"
    events = load(path).planned_events()
    return events, "" if events else f"{CONFIG} does not say how large the model and the federation were"
