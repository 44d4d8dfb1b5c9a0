"""`dpfedexp node`, `superexec`, `superlink`, `guard` and `flower metrics`: a site, its apps, the server, and what was spent."""

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.errors import InputError, require
from dpfedexp.flower.access import check_file, check_folder, forbid_core_dumps

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
    from dpfedexp.flower.guard import Guard, Place, guard_ledger
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
        for path in (holder, *Place.of(holder).files):
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
