"""`python -m reproduction paper | suite | explore | overview | bench`, from the root of the repository."""

from __future__ import annotations

import typer

from dpfedexp.cli import main
from reproduction.commands import bench, paper, suite

app = typer.Typer(
    name="python -m reproduction",
    help="Make again what the README and docs say: the paper, real federations, benchmarks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    suggest_commands=False,
)
app.command("paper")(paper.paper)
app.command("suite")(suite.suite)
app.command("tuned")(suite.tuned)
app.command("explore")(suite.explore)
app.command("overview")(suite.overview)
app.command("bench")(bench.bench)

if __name__ == "__main__":
    main(app)
