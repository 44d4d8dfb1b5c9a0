"""`dpfedexp flower` (example app, local deployment, runs), `dpfedexp node`, `superexec`, `superlink` and `guard`."""

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.errors import InputError, require
from dpfedexp.flower.access import check_file, check_folder, forbid_core_dumps

app = typer.Typer(
    help="A real federation on Flower: an app to start from, and a deployment to try it on.", no_args_is_help=True
)


@app.command()
def new(folder: Annotated[Path, typer.Argument(help="A new or empty folder for the app.")] = Path(".")) -> None:
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
        str | None, typer.Argument(help="A SuperLink in Flower's config.toml [default: that of `flower up`].")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="For the run's files [default: federation.folder].")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("-c", help="Other settings than the app's, such as 'federation.rounds=10'.")
    ] = None,
) -> None:
    """Train, and show the log. The same command resumes a run that did not complete, in the same folder.

    The exit status is 0 if the run completed, 3 if it stopped or failed, 4 if it was killed.
    """
    from dpfedexp.flower.app import run_app

    given = [] if folder is None else [f"federation.folder={json.dumps(str(folder))}"]
    raise typer.Exit(run_app(app, connection, [*(settings or []), *given]))


@app.command()
def status(
    folder: Annotated[Path, typer.Argument(help="The run's folder.")],
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
) -> None:
    """Show the status of a run; the exit status is that of `dpfedexp flower run`."""
    from dpfedexp.flower.monitor import EXIT_CODES, describe, read_status

    content = read_status(folder)
    print(json.dumps(content) if as_json else f"The run is {describe(content)}")
    raise typer.Exit(EXIT_CODES[content["status"]])


@app.command()
def up(
    app: Annotated[Path, typer.Argument(help="The app's folder.")] = Path("."),
    data: Annotated[Path | None, typer.Option(help="A folder with one file or folder for each node.")] = None,
    guard: Annotated[Path | None, typer.Option(help="A guard file, of which every node enforces its own copy.")] = None,
    foreground: Annotated[bool, typer.Option("--foreground", help="Ctrl-C stops them.")] = False,
) -> None:
    """Start a server and one node for each file in data/, on this machine, with TLS and a key for every node."""
    from dpfedexp.flower.app import app_hash, try_task
    from dpfedexp.flower.local_deployment import FOLDER, Deployment, running

    forbid_core_dumps()
    rows = _files_of_nodes(app / "data" if data is None else data)
    limits: dict[str, str] = {}
    if guard is not None:
        require(guard.is_file(), f"guard is {str(guard)!r}, which is not a file.")
        limits["dpfedexp-guard"] = str(guard.resolve())
    place = (app / FOLDER).resolve()
    if not foreground:
        try_task(app, rows)
        _start_in_background(place)
        _explain(len(rows), place, app)
        return
    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    deployment = Deployment(
        place,
        len(rows),
        node_config={number: {"data": str(path.resolve()), **limits} for number, path in enumerate(rows)},
        enforce=guard is not None,
        apps=[app_hash(app)] if guard is not None else [],
    )
    with running(deployment):
        _explain(len(rows), place, app)
        while (ended := deployment.failed()) is None:
            time.sleep(0.5)
        raise InputError(ended)


@app.command()
def down(app: Annotated[Path, typer.Argument(help="The app's folder.")] = Path(".")) -> None:
    """Stop what `dpfedexp flower up` started. A run that is under way can go on later."""
    from dpfedexp.flower.app import STOPPED
    from dpfedexp.flower.local_deployment import FOLDER, run_is_under_way, stop_running

    folder = (app / FOLDER).resolve()
    under_way = run_is_under_way(folder)
    stopped = stop_running(folder)
    print((STOPPED if under_way else "Stopped.") if stopped else "No nodes are up here.")


@app.command("helper-key")
def helper_key(file: Annotated[Path, typer.Argument(help="A new file for the private key.")]) -> None:
    """Make the key of the helper, the second aggregator of two-party aggregation; prints the public key for guard files."""
    from dpfedexp.mechanisms.aggregation import new_key

    print(new_key(file))


def _files_of_nodes(data: Path) -> list[Path]:
    wanted = "it must hold one file or folder for each node"
    require(data.is_dir(), f"data is {str(data)!r}, which is not a folder; {wanted}.")
    found = sorted(path for path in data.iterdir() if not path.name.startswith("."))
    require(bool(found), f"data is {str(data)!r}, which is empty; {wanted}.")
    return found


def _start_in_background(folder: Path) -> None:
    from dpfedexp.flower.local_deployment import find_running

    if find_running(folder) is not None:
        raise InputError("the nodes of this folder are up already; stop them with `dpfedexp flower down`.")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for old in folder.glob("*.log"):
        old.unlink()
    with open(folder / "up.log", "wb") as log:
        command = [sys.executable, "-m", "dpfedexp", *sys.argv[1:], "--foreground"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    while not find_running(folder):
        if process.poll() is not None:
            raise InputError(f"the nodes did not start:\n{(folder / 'up.log').read_text(encoding='utf-8')}")
        time.sleep(0.2)


def _explain(nodes: int, folder: Path, app: Path) -> None:
    where = "" if app == Path(".") else f" {shlex.quote(str(app))}"
    print(f"\nA server and {nodes} nodes are up, with TLS and a key for every node. Logs: {folder}/*.log\n")
    print(f"  dpfedexp flower run{where}     to train\n  dpfedexp flower down{where}    to stop them\n", flush=True)


guard_app = typer.Typer(help="A site's own limits and what was spent under them.", no_args_is_help=True)
PASSES_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
_REFUSED = {
    "--allow-runtime-dependency-installation": "would let an app bring code that its hash does not cover; install what it needs.",
    "--trusted-entities": "is Flower's own list, which refuses every local app; the guard file's apps say what may run.",
}
_SECRET = "--superexec-auth-secret-file"
_FILES = {"--auth-supernode-private-key": 0o600, "--ssl-keyfile": 0o600, _SECRET: 0o640}
"""Options that name secret files, with the most permissive mode of each; the group of the apps reads the last one."""
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def node(
    context: typer.Context,
    guard: Annotated[Path, typer.Option(help="The site's limits, with the hashes of the apps that may run.")],
    app_timeout: Annotated[
        float, typer.Option(help="Seconds that an app may take, if its request does not end earlier.")
    ] = 3600.0,
    poll: Annotated[float, typer.Option(help="Seconds between two questions to the SuperLink.")] = 1.0,
) -> None:
    """Run a SuperNode that enforces the site's own limits. Other options go to flower-supernode.

    Which apps may run, what may leave, how it is clipped, randomized and charged is decided by this process, not by the uploaded
    app.
    """
    os.environ.update(_QUIET)
    from dpfedexp.engine.private_folder import root
    from dpfedexp.flower.guard import HELPER_VARIABLE, Guard, GuardFiles, HelperFile, guard_ledger
    from dpfedexp.flower.site import MessageGate, Site, run_node

    require(
        app_timeout > 0 and poll > 0, f"app_timeout is {app_timeout:g} and poll is {poll:g}; both must be positive."
    )
    limits = Guard.load(guard.expanduser().resolve())
    require(
        bool(limits.apps),
        f"{str(guard)!r} lists no apps; put the hash that `dpfedexp flower hash` prints into apps = […], after reviewing the app.",
    )
    check_options(context.args)
    holders = [limits.path]
    if helper := os.environ.get(HELPER_VARIABLE):
        holders.append(Path(helper).expanduser().resolve())
        check_file(HelperFile.load(holders[1]).private_key, 0o600)
    for holder in holders:
        for path in (holder, *GuardFiles.of(holder).files):
            check_file(path, 0o600)
    forbid_core_dumps()
    os.umask(0o077)
    for holder in holders:
        with guard_ledger(holder):  # an unusable ledger must raise before any request is answered
            pass
    check_folder(root())
    os.environ.pop("DPFEDEXP_GUARD", None)  # the app's processes inherit this environment
    run_node(context.args, MessageGate(Site(limits), app_timeout, poll))


def superexec(context: typer.Context) -> None:
    """Start the apps of an enforcing site, as the apps' user. Options are those of flower-superexec.

    An app's token is on no command line, and neither this process nor an app can dump core.
    """
    os.environ.update(_QUIET)
    forbid_core_dumps()
    os.umask(0o077)
    given = split_options(context.args)
    if secret := given.get(_SECRET):
        check_file(Path(secret), 0o640, owned=False)
    from dpfedexp.flower.superexec import run_superexec

    run_superexec(context.args)


def superlink(
    context: typer.Context,
    nodes: Annotated[Path, typer.Option(help="A file with the public keys of the nodes that may connect.")],
    fleet: Annotated[str, typer.Option(help="Where nodes connect: an IP address and a port.")] = "127.0.0.1:9092",
    control_port: Annotated[int, typer.Option(help="On loopback, for `flwr run`.")] = 9093,
) -> None:
    """Run a SuperLink of which the network sees only what nodes need, and which keeps nothing on disk.

    Other options go to flower-superlink, such as --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile.
    """
    os.environ.update(_QUIET)
    from dpfedexp.flower.superlink import serve

    forbid_core_dumps()
    if key := split_options(context.args).get("--ssl-keyfile"):
        check_file(Path(key), 0o600)
    serve(context.args, fleet=fleet, control_port=control_port, nodes=nodes)


def split_options(options: Sequence[str]) -> dict[str, str]:
    """Return each option with its value, written as `--name value` or `--name=value`."""
    split = [word for option in options for word in (option.split("=", 1) if option.startswith("--") else [option])]
    return dict(itertools.pairwise([*split, ""]))


def check_options(options: Sequence[str]) -> None:
    """Raise `InputError` for options of flower-supernode that would weaken the isolation of a site."""
    given = split_options(options)
    for option, name in itertools.product(given, (*_REFUSED, *_FILES, "--insecure", "--isolation", "--superlink")):
        # Flower would accept the abbreviation.
        short = option.startswith("--") and name.startswith(option) and option != name
        require(not short, f"{option} is short for {name}; write it out.")
    for name, why in _REFUSED.items():
        require(name not in given, f"{name} {why}")
    host = given.get("--superlink", "127.0.0.1:").rpartition(":")[0].strip("[]")
    require(
        "--insecure" not in given or host in ("127.0.0.1", "::1", "localhost"),
        f"--insecure sends everything to {host} unencrypted; use TLS (--root-certificates).",
    )
    require(
        given.get("--isolation") != "process" or _SECRET in given,
        "--isolation process needs --superexec-auth-secret-file, or any user of this machine can answer in the app's place.",
    )
    for name, most in _FILES.items():
        if name in given:
            check_file(Path(given[name]), most)


@guard_app.callback()
def _guard() -> None: ...


@guard_app.command()
def show(
    file: Annotated[Path, typer.Argument(help="The guard file, or a helper's file of two-party aggregation.")],
    last: Annotated[int, typer.Option(help="How many of the newest charges to list.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="For a program.")] = False,
) -> None:
    """Show the limits, what was spent, and the newest charges; exit status 2 if the node would refuse its own ledger."""
    from dpfedexp.flower.monitor import guard_summary, load_limits

    summary = guard_summary(load_limits(file), last)
    if as_json:
        print(json.dumps(summary))
    else:
        print(
            f"{summary['charges']} charges, epsilon {summary['epsilon']:.4f} of {summary['max_epsilon_total']:g} at delta "
            f"{summary['delta']:g} (at most {summary['max_epsilon_per_round']:g} a round)"
        )
        for line in summary["last"]:
            print(
                f"  {line['time'] or 'no time':25}  run {line['run']}  round {line['round']}  app {line['app'][:12] or '-'}"
            )
    if summary["problem"]:
        raise InputError(summary["problem"])


@app.command()
def metrics(
    run: Annotated[Path | None, typer.Option(help="The folder of a run.")] = None,
    guard: Annotated[Path | None, typer.Option(help="A guard file, or a helper's file.")] = None,
    listen: Annotated[str, typer.Option(help="Where Prometheus asks: an IP address and a port.")] = "127.0.0.1:9464",
) -> None:
    """Serve /metrics for Prometheus and /healthz, from the files of a run or of a site."""
    from dpfedexp.flower.access import parse_address
    from dpfedexp.flower.monitor import guard_metrics, metrics_server, run_metrics

    if run is not None and guard is None:
        source = partial(run_metrics, run)
    elif guard is not None and run is None:
        source = partial(guard_metrics, guard)
    else:
        raise InputError("name a --run or a --guard; several need a process each.")
    with metrics_server(source, *parse_address(listen, "listen")) as server:
        print(f"http://{listen}/metrics and http://{listen}/healthz", flush=True)
        server.serve_forever()
