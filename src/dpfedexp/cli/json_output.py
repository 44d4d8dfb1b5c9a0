"""`--json`: one object on standard output."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from dpfedexp.json_values import finite

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(finite(value), indent=2, ensure_ascii=False))
