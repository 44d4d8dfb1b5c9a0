"""`dpfedexp flower`: an app to start from, a deployment to try it on, and runs that say how they ended; then `dpfedexp node`,
`superexec`, `superlink` and `guard`: a site, its apps, the server, and what was spent.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dpfedexp.errors import InputError, require
from dpfedexp.flower.access import check_file, check_folder, forbid_core_dumps

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


guard_app = typer.Typer(help="A site's own limits and what was spent under them.", no_args_is_help=True)
PASSES_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
_REFUSED = {
    "--allow-runtime-dependency-installation": "would let an app bring code that its hash does not cover; install what it needs.",
    "--trusted-entities": "is Flower's own list, which refuses every local app; the guard file's apps say what may run.",
}
_SECRET = "--superexec-auth-secret-file"
_FILES = {"--auth-supernode-private-key": 0o600, "--ssl-keyfile": 0o600, _SECRET: 0o640}
"""Options that name secrets, and the mode that each may have at most: the apps' group reads the last one."""
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def node(
    context: typer.Context,
    guard: Annotated[Path, typer.Option(help="The site's limits, with the hashes of the apps that may run.")],
    patience: Annotated[
        float, typer.Option(help="Seconds that an app may take, if its request does not end earlier.")
    ] = 3600.0,
    poll: Annotated[float, typer.Option(help="Seconds between two questions to the SuperLink.")] = 1.0,
) -> None:
    """Run a SuperNode that enforces the site's own limits. Other options go to flower-supernode.

    Which apps may run, what may leave, how it is clipped, randomised and charged is decided by this process, not by the uploaded
    app.
    """
    os.environ.update(_QUIET)
    from dpfedexp.engine.private_folder import root
    from dpfedexp.flower.guard import Guard, GuardFiles, guard_ledger
    from dpfedexp.flower.helper import VARIABLE, HelperFile
    from dpfedexp.flower.site import Seam, Site, run_node

    require(patience > 0 and poll > 0, f"patience is {patience:g} and poll is {poll:g}; both must be positive.")
    limits = Guard.load(guard.expanduser().resolve())
    require(
        bool(limits.apps),
        f"{str(guard)!r} lists no apps; put the hash that `dpfedexp flower hash` prints into apps = […], once it has been read.",
    )
    check_options(context.args)
    holders = [limits.path]
    if helper := os.environ.get(VARIABLE):
        holders.append(Path(helper).expanduser().resolve())
        check_file(HelperFile.load(holders[1]).private_key, 0o600)
    for holder in holders:
        for path in (holder, *GuardFiles.of(holder).files):
            check_file(path, 0o600)
    forbid_core_dumps()
    os.umask(0o077)
    for holder in holders:
        with guard_ledger(holder):  # a ledger that can't be used is said here, before anything is answered
            pass
    check_folder(root())
    os.environ.pop("DPFEDEXP_GUARD", None)  # the app's processes inherit this environment
    run_node(context.args, Seam(Site(limits), patience, poll))


def superexec(context: typer.Context) -> None:
    """Run what starts an enforcing site's apps, as the apps' user. Options are those of flower-superexec.

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
    fleet: Annotated[str, typer.Option(help="Where nodes connect: an IP address and a port.")] = "127.0.0.1:9092",
    control_port: Annotated[int, typer.Option(help="On loopback, for `flwr run`.")] = 9093,
    nodes: Annotated[
        Path | None, typer.Option(help="A file with the public keys of the nodes that may connect.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Without TLS and without known nodes; on loopback only.")
    ] = False,
) -> None:
    """Run a SuperLink of which the network sees only what nodes need, and which keeps nothing on disk.

    Other options go to flower-superlink, such as --ssl-certfile, --ssl-keyfile and --ssl-ca-certfile.
    """
    os.environ.update(_QUIET)
    from dpfedexp.flower.superlink import serve

    forbid_core_dumps()
    if key := split_options(context.args).get("--ssl-keyfile"):
        check_file(Path(key), 0o600)
    serve(context.args, fleet=fleet, control_port=control_port, nodes=nodes, insecure=insecure)


def split_options(options: Sequence[str]) -> dict[str, str]:
    """Each option with the word after it, written `--name value` or `--name=value`."""
    split = [word for option in options for word in (option.split("=", 1) if option.startswith("--") else [option])]
    return dict(itertools.pairwise([*split, ""]))


def check_options(options: Sequence[str]) -> None:
    """Refuses what would open a site that is meant to be closed."""
    given = split_options(options)
    written_out(given, (*_REFUSED, *_FILES, "--insecure", "--isolation", "--superlink"))
    for name, why in _REFUSED.items():
        require(name not in given, f"{name} {why}")
    host = given.get("--superlink", "127.0.0.1:").rpartition(":")[0].strip("[]")
    require(
        "--insecure" not in given or host in ("127.0.0.1", "::1", "localhost"),
        f"--insecure sends everything to {host} as it is; use TLS (--root-certificates).",
    )
    require(
        given.get("--isolation") != "process" or _SECRET in given,
        "--isolation process needs --superexec-auth-secret-file, or any user of this machine can answer in the app's place.",
    )
    for name, most in _FILES.items():
        if name in given:
            check_file(Path(given[name]), most)


def written_out(options: Iterable[str], names: Iterable[str]) -> None:
    """Refuses short forms of these options, which Flower would take for the whole."""
    for option, name in itertools.product(options, names):
        short = option.startswith("--") and name.startswith(option) and option != name
        require(not short, f"{option} is short for {name}; write it out.")


@guard_app.callback()
def _guard() -> None: ...


@guard_app.command()
def show(
    file: Annotated[
        Path, typer.Argument(help="The guard file, or a helper's file of two-party aggregation.", show_default=False)
    ],
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
    run: Annotated[list[Path] | None, typer.Option(help="The folder of a run.", show_default=False)] = None,
    guard: Annotated[
        list[Path] | None, typer.Option(help="A guard file, or a helper's file.", show_default=False)
    ] = None,
    listen: Annotated[str, typer.Option(help="Where Prometheus asks: an IP address and a port.")] = "127.0.0.1:9464",
) -> None:
    """Serve /metrics for Prometheus and /healthz, from the files of a run or of a site."""
    from dpfedexp.flower.access import parse_address
    from dpfedexp.flower.monitor import guard_metrics, metrics_server, run_metrics

    sources = [partial(run_metrics, folder) for folder in run or []] + [partial(guard_metrics, f) for f in guard or []]
    if len(sources) != 1:
        raise InputError("name one --run or one --guard; several need a process each.")
    host, port = parse_address(listen, "listen")
    with metrics_server(list(sources), host, port) as server:
        print(f"http://{listen}/metrics and http://{listen}/healthz", flush=True)
        server.serve_forever()
