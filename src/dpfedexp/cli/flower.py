"""`dpfedexp flower`: an app to start from, a deployment to try it on, and runs that say how they ended."""

from __future__ import annotations

import shlex
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dpfedexp.errors import InputError, require
from dpfedexp.flower.access import forbid_core_dumps

if TYPE_CHECKING:
    from dpfedexp.flower.local import Deployment

app = typer.Typer(
    help="A real federation on Flower: an app to start from, and a deployment to try it on.", no_args_is_help=True
)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A new folder for the app.", show_default=False)],
) -> None:
    """Write a small Flower app: pyproject.toml, server_app.py, client_app.py, task.py."""
    from dpfedexp.flower.app import new_app

    console = Console()
    for path in new_app(folder):
        console.print(f"Wrote [bold]{path}[/]", highlight=False)
    console.print(
        f"\nSimulated on this machine:  cd {folder} && flwr run . local --stream --federation-config 'num-supernodes=3' "
        "-c 'federation.folder=\"runs/simulated\"'\n"
        f"As real processes:          dpfedexp flower up --nodes 3 --tls",
        highlight=False,
        soft_wrap=True,
    )


@app.command("hash")
def hash_(
    folder: Annotated[Path, typer.Argument(help="The app's folder, after its source has been read.")] = Path("."),
) -> None:
    """Print the hash of an app, by which a site's guard file says that it may run there."""
    from dpfedexp.flower.app import app_hash

    print(app_hash(folder))


@app.command()
def run(
    folder: Annotated[Path, typer.Argument(help="The app's folder.")] = Path("."),
    connection: Annotated[str, typer.Argument(help="The SuperLink's name in Flower's config.toml.")] = "up",
    settings: Annotated[
        list[str] | None, typer.Option("-c", help="Settings, as for flwr run.", show_default=False)
    ] = None,
) -> None:
    """Run an app and show its log; the exit status is 0 if it completed, 3 if it stopped or failed, 4 if it was killed."""
    from dpfedexp.flower.app import run_app

    raise typer.Exit(run_app(folder, connection, settings or []))


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)],
) -> None:
    """How a run stands, from its status.json; the exit status is that of `dpfedexp flower run`."""
    import json

    from dpfedexp.flower.monitor import EXIT_CODES, read_status

    content = read_status(folder)
    print(json.dumps(content))
    raise typer.Exit(EXIT_CODES[content["status"]])


@app.command()
def up(
    nodes: Annotated[int, typer.Option(help="How many SuperNodes.")] = 3,
    tls: Annotated[bool, typer.Option("--tls", help="TLS certificates and node authentication.")] = False,
    guard: Annotated[
        Path | None, typer.Option(help="A guard file: every node obeys a copy of its own, beside it.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="For keys and logs [default: a temporary folder].")] = None,
    enforce: Annotated[
        bool, typer.Option("--enforce", help="Nodes obey the guard file whatever the app does; it must list apps.")
    ] = False,
    settings: Annotated[
        Path | None, typer.Option(help="A TOML file with a table for each node that needs settings: [node0] data = …")
    ] = None,
) -> None:
    """Start a SuperLink and SuperNodes on this machine, show their logs, and stop all of them at Ctrl-C."""
    from dpfedexp.flower.local import Deployment

    forbid_core_dumps()
    require(nodes >= 1, f"nodes is {nodes}; it must be a positive whole number.")
    config: dict[str, str | int | float] = {}
    if guard is not None:
        require(guard.is_file(), f"guard is {str(guard)!r}, which is not a file.")
        config["dpfedexp-guard"] = str(guard.resolve())
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    with (
        tempfile.TemporaryDirectory(prefix="dpfedexp-up-") as temporary,
        Deployment(
            folder or temporary,
            nodes,
            tls=tls,
            node_config=config,
            of_node=_read_settings(settings, nodes),
            enforce=enforce,
        ) as deployment,
    ):
        _explain(deployment)
        _follow(deployment)


@app.command("helper-key")
def helper_key(
    file: Annotated[Path, typer.Argument(help="A new file for the private key.", show_default=False)],
) -> None:
    """Make the key of a helper of two-party aggregation, and print the public key that sites put into their guard files."""
    from dpfedexp.mechanisms.aggregation import new_key

    print(new_key(file))


def _read_settings(path: Path | None, nodes: int) -> dict[int, dict[str, str | int | float]]:
    """The tables [node0], [node1] … of a file; other names get a sentence."""
    if path is None:
        return {}
    import tomllib

    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"settings is {str(path)!r}, which can't be read: {error}.") from None
    known = {f"node{index}": index for index in range(nodes)}
    for name, table in tables.items():
        good = name in known and isinstance(table, dict)
        require(good, f"settings: {name} is not a node; there are node0 to node{nodes - 1}, each a table.")
    return {known[name]: table for name, table in tables.items()}


def _explain(deployment: Deployment) -> None:
    how = "TLS, nodes authenticated" if deployment.tls else "no TLS"
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in deployment.exports.items())
    print(
        f"\nA SuperLink on 127.0.0.1:{deployment.port} and {deployment.nodes} SuperNodes ({how}). In the app's folder:\n"
    )
    print(f"  export {exports}\n  dpfedexp flower run . up\n\nCtrl-C stops everything.\n", flush=True)


def _follow(deployment: Deployment) -> None:
    """Print what the processes write, a name before each line, until one of them ends or the user stops."""
    read: dict[Path, int] = {}
    while True:
        for path in sorted(deployment.folder.glob("*.log")):
            with path.open(encoding="utf-8", errors="replace") as log:
                log.seek(read.get(path, 0))
                for line in log:
                    print(f"{path.stem:>11} | {line.rstrip()}", flush=True)
                read[path] = log.tell()
        ended = deployment.failed()
        if ended is not None:
            raise InputError(ended)
        time.sleep(0.5)
