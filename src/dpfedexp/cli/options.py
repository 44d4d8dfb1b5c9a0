"""Flags that commands share. They import nothing that is slow, so that help and completion are immediate.

The values of a flag repeat what the accounting room accepts; a test compares the two.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand

from dpfedexp.errors import InputError
from dpfedexp.files import finite
from dpfedexp.mechanisms.registry import MECHANISMS

# Enumerations by call have members that only a table knows; mypy can't follow those, and none is named here.
Mechanism = StrEnum(  # type: ignore[misc]
    "Mechanism", {name.replace("-", "_"): name for name in MECHANISMS if name != "none"}
)
CENTRAL = Mechanism("central-gaussian")


class FileCommand(TyperCommand):
    """A command that takes a settings file: a setting that is typed as an option gets the `--set` that means it."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            from dpfedexp.config.settings import Settings, places

            found = places(Settings, error.option_name.lstrip("-").replace("-", "_"))
            if not found:
                raise
            write = " or ".join(f"--set {place}=…" for place in found)
            raise InputError(f"{self.name} has no option {error.option_name}; write {write}.") from None


class AdjacencyName(StrEnum):
    replace_one = "replace-one"
    add_remove = "add-remove"


class GammaName(StrEnum):
    exact = "exact"
    paper = "paper"


class SamplingKind(StrEnum):
    poisson = "poisson"
    fixed = "fixed"


class Per(StrEnum):
    total = "total"
    round = "round"


MechanismOption = Annotated[Mechanism, typer.Option("--mechanism", help="Who adds the noise, and how.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
DataOption = Annotated[str | None, typer.Option(help="Folder with the data set's files.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder for the results; by default runs/<name>-<time>.")]
ResumeOption = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in --out; starts it if the folder is empty.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(value: dict[str, Any]) -> None:
    """One object on standard output."""
    typer.echo(json.dumps(finite(value), indent=2, ensure_ascii=False))
