"""The command line."""

import sys
import warnings

import typer
from rich.console import Console
from rich.markup import escape

from dpfedexp import __version__
from dpfedexp.errors import BudgetExceeded, InputError, LedgerError, RoundFailed

app = typer.Typer(
    name="dpfedexp",
    help="Differentially private federated learning with an adaptive server step size (DP-FedEXP).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    suggest_commands=False,  # click itself suggests the command that was meant
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Show the version and exit."
    ),
) -> None: ...


def _register() -> None:
    from dpfedexp.cli import audit, demo, fit, flower, options, plan, privacy, sweep, train

    app.command("demo")(demo.demo)
    app.command("fit")(fit.fit)
    app.command("train", cls=options.FileCommand)(train.train)
    app.command("init")(train.init)
    app.command("plan")(plan.plan)
    app.command("sweep", cls=options.FileCommand)(sweep.sweep)
    app.command("report")(train.report)
    app.command("audit")(audit.audit)
    for command in (flower.node, flower.superexec, flower.superlink):
        app.command(command.__name__, context_settings=flower.PASSES_OPTIONS)(command)
    app.add_typer(privacy.app, name="privacy")
    app.add_typer(flower.app, name="flower")
    app.add_typer(flower.guard_app, name="guard")


_register()


def main(command: typer.Typer = app) -> None:
    """Run the command line. Input errors are printed without a traceback, with exit code 2."""
    console = Console(stderr=True)
    warnings.showwarning = lambda message, *rest, **more: console.print(
        f"[yellow]Note:[/] {escape(str(message))}", soft_wrap=True
    )
    try:
        command()
    except (InputError, LedgerError) as error:
        console.print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)
    except (BudgetExceeded, RoundFailed) as error:
        console.print(f"[bold red]Stopped:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(3)
    except KeyboardInterrupt:
        console.print("[yellow]Interrupted.[/]")
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
