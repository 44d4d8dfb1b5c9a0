"""Flags that commands share. They import nothing that is slow, so that help and completion are immediate.

The values of a flag repeat what the accounting room accepts; a test compares the two.
"""

from __future__ import annotations

import json
from enum import StrEnum
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
NoiseOption = Annotated[
    float | None,
    typer.Option("--noise-multiplier", "-z", help="Noise std on the sum over the clip C (local: on each update)."),
]
RoundsOption = Annotated[int, typer.Option("--rounds", "-T", help="How many rounds are released.")]
DeltaOption = Annotated[float, typer.Option("--delta", help="δ of the total.")]
RateOption = Annotated[
    float, typer.Option("--sampling-rate", "-q", help="Expected fraction of the clients in a round.")
]
SamplingOption = Annotated[
    SamplingKind, typer.Option("--sampling", help="How a cohort is drawn when the rate is below 1.")
]
AdjacencyOption = Annotated[AdjacencyName, typer.Option("--adjacency", help="What changes between neighbours.")]
Epsilon0Option = Annotated[float, typer.Option("--epsilon0", help="PrivUnit: ε₀.")]
Epsilon1Option = Annotated[float, typer.Option("--epsilon1", help="PrivUnit: ε₁.")]
Epsilon2Option = Annotated[float, typer.Option("--epsilon2", help="PrivUnit: ε₂, for the norm.")]
GammaOption = Annotated[
    GammaName, typer.Option("--gamma", help="PrivUnit: the rule that chooses the cap; the paper's needs --dimension.")
]
DimensionOption = Annotated[
    int | None, typer.Option("--dimension", "-d", help="Parameters of the model, where a round's cost depends on them.")
]
ClientsOption = Annotated[
    int | None,
    typer.Option(
        "--clients", "-M", help="Clients that report in every round; local: adds readers of the models alone."
    ),
]
TargetOption = Annotated[float, typer.Option("--epsilon", "--target-epsilon", "-e", help="The ε that may be spent.")]
PerOption = Annotated[Per, typer.Option("--per", help="Whether the target is for all the rounds or for one.")]

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def print_json(value: dict[str, Any]) -> None:
    """One object on standard output."""
    typer.echo(json.dumps(finite(value), indent=2, ensure_ascii=False))
