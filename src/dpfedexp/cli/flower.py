"""`dpfedexp flower`: an app to start from, a deployment to try it on, and runs that say how they ended."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpfedexp.errors import InputError, require
from dpfedexp.flower.access import forbid_core_dumps

if TYPE_CHECKING:
    from dpfedexp.flower.local import Deployment

app = typer.Typer(
    help="A real federation on Flower: an app to start from, and a deployment to try it on.", no_args_is_help=True
)


@app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder for the app.")] = Path("."),
) -> None:
    """Write a small app, with three nodes' example data in data/. Its federation/task.py is the one file to change."""
    from dpfedexp.flower.app import new_app

    for path in new_app(folder):
        print(f"Wrote {path}")
    where = "" if folder == Path(".") else f"cd {shlex.quote(str(folder))} && "
    print(
        f"\nChange federation/task.py (model and data) and put a file for each node into data/; or try it as it is:\n\n"
        f"  {where}dpfedexp flower up && dpfedexp flower run\n"
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
    app: Annotated[Path, typer.Argument(help="The app's folder.")] = Path("."),
    connection: Annotated[
        str | None,
        typer.Argument(
            help="A SuperLink in Flower's config.toml [default: that of `dpfedexp flower up`].", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For the run's files [default: federation.folder].", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on after the last completed round.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("-c", help="Other settings than the app's, such as 'federation.rounds=10'.", show_default=False),
    ] = None,
) -> None:
    """Train, and show the log; the exit status is 0 if the run completed, 3 if it stopped or failed, 4 if it was killed."""
    from dpfedexp.flower.app import run_app

    given = [*(settings or []), *(["federation.resume=true"] if resume else [])]
    if folder is not None:
        given.append(f"federation.folder={json.dumps(str(folder))}")
    raise typer.Exit(run_app(app, connection, given))


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="The run's folder.", show_default=False)],
) -> None:
    """How a run stands, from its status.json; the exit status is that of `dpfedexp flower run`."""
    from dpfedexp.flower.monitor import EXIT_CODES, read_status

    content = read_status(folder)
    print(json.dumps(content))
    raise typer.Exit(EXIT_CODES[content["status"]])


@app.command()
def up(
    app: Annotated[Path, typer.Argument(help="The app's folder.")] = Path("."),
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder with one file or folder for each node [default: the app's data].", show_default=False
        ),
    ] = None,
    guard: Annotated[
        Path | None,
        typer.Option(
            help="A guard file with limits; every node enforces a copy of its own, beside it.", show_default=False
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="For keys and logs [default: .up in the app's folder].", show_default=False)
    ] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Show the logs, and stop at Ctrl-C.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="With --foreground: show no logs.")] = False,
) -> None:
    """Start a server and one node for each file in data/, on this machine, with TLS and a key for every node."""
    from dpfedexp.flower.app import app_hash
    from dpfedexp.flower.local import FOLDER, Deployment, running

    forbid_core_dumps()
    rows = _files_of_nodes(app / "data" if data is None else data)
    config: dict[str, str | int | float] = {}
    if guard is not None:
        require(guard.is_file(), f"guard is {str(guard)!r}, which is not a file.")
        config["dpfedexp-guard"] = str(guard.resolve())
    place = (app / FOLDER if folder is None else folder).resolve()
    if not foreground:
        _start_in_background(place)
        _explain(len(rows), place, app, own=folder is None)
        return
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    deployment = Deployment(
        place,
        len(rows),
        tls=True,
        node_config=config,
        of_node={number: {"data": str(path.resolve())} for number, path in enumerate(rows)},
        enforce=guard is not None,
        apps=[app_hash(app)] if guard is not None else [],
    )
    with running(deployment):
        _explain(len(rows), place, app, own=folder is None)
        _watch(deployment, show=not quiet)


@app.command()
def down(
    app: Annotated[Path, typer.Argument(help="The app's folder.")] = Path("."),
    folder: Annotated[Path | None, typer.Option(help="As given to `up`.", show_default=False)] = None,
) -> None:
    """Stop what `dpfedexp flower up` started."""
    from dpfedexp.flower.local import FOLDER, stop_running

    found = stop_running((app / FOLDER if folder is None else folder).resolve())
    print("Stopped." if found else "No nodes are up here.")


@app.command("helper-key")
def helper_key(
    file: Annotated[Path, typer.Argument(help="A new file for the private key.", show_default=False)],
) -> None:
    """Make the key of the helper, the second aggregator of two-party aggregation; prints the public key for guard files."""
    from dpfedexp.mechanisms.aggregation import new_key

    print(new_key(file))


def _files_of_nodes(data: Path) -> list[Path]:
    """The entries of a folder, by name: each is one node's."""
    require(
        data.is_dir(), f"data is {str(data)!r}, which is not a folder; it must hold one file or folder for each node."
    )
    found = sorted(path for path in data.iterdir() if not path.name.startswith("."))
    require(bool(found), f"data is {str(data)!r}, which is empty; it must hold one file or folder for each node.")
    return found


def _start_in_background(folder: Path) -> None:
    """The same command in the foreground of a process of its own, until it is up."""
    from dpfedexp.flower.local import find_running

    if find_running(folder) is not None:
        raise InputError("the nodes of this folder are up already; stop them with `dpfedexp flower down`.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in folder.glob("*.log"):
        old.unlink()
    with open(folder / "up.log", "wb") as log:
        command = [sys.executable, "-m", "dpfedexp", *sys.argv[1:], "--foreground", "--quiet"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    while not find_running(folder):
        if process.poll() is not None:
            raise InputError(f"the nodes did not start:\n{(folder / 'up.log').read_text(encoding='utf-8')}")
        time.sleep(0.2)


def _explain(nodes: int, folder: Path, app: Path, *, own: bool) -> None:
    print(f"\nA server and {nodes} nodes are up, with TLS and a key for every node. Logs: {folder}/*.log\n")
    if own:
        where = "" if app == Path(".") else f" {shlex.quote(str(app))}"
        print(f"  dpfedexp flower run{where}     to train\n  dpfedexp flower down{where}    to stop them\n", flush=True)
    else:
        print(
            f"  FLWR_HOME={shlex.quote(str(folder / 'flwr-home'))} dpfedexp flower run {shlex.quote(str(app))} up",
            flush=True,
        )
        print(f"  dpfedexp flower down --folder {shlex.quote(str(folder))}\n", flush=True)


def _watch(deployment: Deployment, *, show: bool) -> None:
    """Wait until a process ends or the user stops; meanwhile show what they write, a name before each line."""
    read: dict[Path, int] = {}
    while (ended := deployment.failed()) is None:
        for name in deployment.logs if show else ():
            path = deployment.folder / f"{name}.log"
            with path.open(encoding="utf-8", errors="replace") as log:
                log.seek(read.get(path, 0))
                for line in log:
                    print(f"{name:>11} | {line.rstrip()}", flush=True)
                read[path] = log.tell()
        time.sleep(0.5)
    raise InputError(ended)
