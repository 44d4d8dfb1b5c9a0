"""`dpfedexp train`, `dpfedexp init` and `dpfedexp report`: a run, its settings file, and its report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpfedexp.cli.options import DataOption, OutOption, QuietOption, SetOption
from dpfedexp.errors import InputError, require

if TYPE_CHECKING:
    from dpfedexp.config import Settings
    from dpfedexp.config.problem import Problem
    from dpfedexp.engine.plan import Advice
    from dpfedexp.engine.run import Run, RunFolder

SCHEMA = Path(__file__).parents[1] / "config" / "schema.json"
"""The JSON schema of the settings file; `python docs/hooks/settings_schema.py` makes it from the settings."""
TEMPLATE = SCHEMA.with_name("template.toml")
"""What `dpfedexp init` writes; {name} stands for the name of the file."""


def train(
    file: Annotated[Path, typer.Argument(help="The run's TOML file; `dpfedexp init` writes one.", show_default=False)],
    set_: SetOption = None,
    out: OutOption = None,
    data: DataOption = None,
    quiet: QuietOption = False,
) -> None:
    """Train a model over simulated clients and write metrics, model, ledger and privacy statement."""
    from dpfedexp.config import load
    from dpfedexp.engine import ranks as distributed

    settings = load(file, set_ or ())
    settings.check()
    distributed.join()
    if distributed.rank() > 0:
        execute(settings, None, data=data)
        distributed.leave()
        return
    folder = run_folder(settings, out, file.stem)
    with on_interrupt(f"Resume with: dpfedexp train {file} --out {folder.path}, and the same --set."):
        run = execute(settings, folder, data=data, progress=not quiet)
        distributed.leave()
    show_run(Console(), run, folder)


def run_folder(settings: Settings, out: Path | None, name: str) -> RunFolder:
    """Return the folder `out`, whose run is resumed, or a new folder below `runs`."""
    from dpfedexp.engine.run import RunFolder

    path, data = out or Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}", settings.data
    texts = {"factory": data.factory, "npz": data.path, "synthetic": f"synthetic, dimension {data.dimension}"}
    return RunFolder(path, resume=out is not None, command=command_line(), data=str(texts.get(data.kind, data.kind)))


@contextmanager
def on_interrupt(advice: str) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        Console(stderr=True).print(advice, highlight=False, soft_wrap=True, markup=False)
        raise


def execute(
    settings: Settings,
    folder: RunFolder | None,
    *,
    data: str | None = None,
    progress: bool = True,
    built: Problem | None = None,
    choices_of: Callable[[Run], tuple[str, ...]] | None = None,
    on_advice: Callable[[Advice], None] | None = None,
) -> Run:
    """Train with the settings and write to `folder`; it is None on all ranks of a distributed run but the first.

    `data` is the folder with the files of the data set, `built` the clients and the model if they are already built, and
    `choices_of` returns the automatically chosen settings of the finished run, for its statement.
    """
    from dpfedexp.config import Resolved, problem
    from dpfedexp.engine.stopping import OnAdvice
    from dpfedexp.engine.train import train as run_training

    built = built or problem.build(settings, data)
    participation = settings.build_participation()
    clients, parameters = public_sizes(settings, built)
    cohort = participation.expected(clients)
    if folder is not None:
        folder.write_config(settings.as_run(Resolved(parameters=parameters, clients=clients, cohort=cohort)))
    run = run_training(
        built.model,
        built.federation,
        settings.build_algorithm(),
        local=settings.build_local(),
        participation=participation,
        evaluate=settings.build_evaluate(built.evaluate or built.test),
        out=folder,
        on_round=OnAdvice(on_advice or show_advice),
        execution=replace(settings.build_execution(), progress=progress),
        **settings.run_options(),
    )
    if choices_of is not None:
        run = replace(run, privacy=replace(run.privacy, choices=choices_of(run)))
        if folder is not None:
            folder.state(run.privacy)
    return run


def public_sizes(settings: Settings, built: Problem) -> tuple[int, int]:
    """Return the public number of clients and the number of trained parameters."""
    participation = settings.build_participation()
    # Not None, because the actual number of clients is known.
    clients = cast(int, settings.build_population(settings.build_algorithm(), participation, len(built.federation)))
    return clients, sum(p.numel() for p in built.model.parameters() if p.requires_grad)


def command_line() -> str:
    """Return the present command with all options and arguments that were typed."""
    return shlex.join(["dpfedexp", *sys.argv[1:]])


def show_advice(advice: Advice) -> None:
    """Print a message on standard error, above a progress bar; "dead" is skipped, because `show_run` prints it at the end."""
    if advice.code == "dead":
        return
    word = "[bold yellow]Warning:[/]" if advice.level == "warning" else "[yellow]Note:[/]"
    Console(stderr=True).print(f"{word} {escape(advice.sentence)}", highlight=False, soft_wrap=True)


def show_run(console: Console, run: Run, folder: RunFolder) -> None:
    """Print a run's rounds, statement and files; the exit code is 3 if it stopped early."""
    from dpfedexp.accounting.statement import wrap
    from dpfedexp.engine import outlets, plot, runner
    from dpfedexp.engine.run import baseline_text

    if run.history:
        table = Table("round", "", title=f"{folder.path}", title_justify="left")
        shown = run.history if len(run.history) <= 8 else [*run.history[:1], *run.history[9:-1:10], run.history[-1]]
        whose = "" if run.privacy.noise_cohort is None else runner.OF_LARGER_DEPLOYMENT
        for record in shown:
            table.add_row(str(record["round"]), runner.show(record, whose))
        console.print(table)
        last = run.history[-1]
        for key in (key for key in run.baselines if key in last):
            console.print(f"{plot.name_of(key)} {last[key]:.4g}{baseline_text(run.baselines, key)}", highlight=False)
    if run.stopped:
        console.print(f"[yellow]Stopped early:[/] {run.stopped}", highlight=False)
    console.print(wrap(run.privacy.text, min(console.width, 120)), highlight=False, soft_wrap=True, markup=False)
    names = (outlets.MODEL, outlets.METRICS, outlets.METRICS_TABLE, outlets.STATEMENT_TEXT, outlets.LEDGER)
    console.print(f"\nWritten to [bold]{folder.path}[/]: {', '.join(names)}")
    if run.verdict:
        console.print(f"\n[bold red]{escape(run.verdict)}[/]", highlight=False, soft_wrap=True)
    if run.stopped:
        raise typer.Exit(3)


def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("dpfedexp.toml"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a commented TOML file to start from."""
    require(force or not file.exists(), f"the file {str(file)!r} exists; name another one or use --force.")
    try:
        file.write_text(TEMPLATE.read_text(encoding="utf-8").replace("{name}", str(file)), encoding="utf-8")
    except OSError as error:
        raise InputError(f"the file {str(file)!r} can't be written: {error.strerror}.") from None
    console = Console()
    console.print(f"Wrote [bold]{file}[/]. Next: dpfedexp train {file}")
    console.print(f"Editors that know TOML schemas check it with this first line:\n#:schema {SCHEMA}", soft_wrap=True)


def report(
    folder: Annotated[
        Path, typer.Argument(help="What `train`, `fit` or `demo` wrote, or a folder of runs.", show_default=False)
    ],
) -> None:
    """Write FOLDER/report.html: figures, tables, privacy, configuration and commands in one self-contained file."""
    from dpfedexp.report.page import report as write_report

    Console().print(f"Wrote [bold]{write_report(folder)}[/].", highlight=False, soft_wrap=True)
