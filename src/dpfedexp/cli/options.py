"""Options that several commands share. This module imports nothing slow, so that `--help` is fast."""

import json
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperCommand

from dpfedexp.errors import InputError
from dpfedexp.files import finite
from dpfedexp.mechanisms.registry import MECHANISMS

CENTRAL = "central-gaussian"


class FileCommand(TyperCommand):
    """A command with a settings file: if a setting is typed as an option, the error names the `--set` for it."""

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


MechanismOption = Annotated[
    str,
    typer.Option(
        help="Who adds the noise, and how.", click_type=click.Choice([name for name in MECHANISMS if name != "none"])
    ),
]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a setting.")]
DataOption = Annotated[str | None, typer.Option(help="Folder with the data set's files.")]
OutOption = Annotated[
    Path | None, typer.Option(help="Folder for the results, or of a run to resume; by default runs/<name>-<time>.")
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(finite(value), indent=2, ensure_ascii=False))
