"""`dpfedexp node` and `dpfedexp superlink`: what a site and what the server run, in front of Flower's own options."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.errors import InputError, require

PASSES_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
_QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


def node(
    context: typer.Context,
    guard: Annotated[Path, typer.Option(help="The site's limits, with the hashes of the apps that may run.")],
    patience: Annotated[float, typer.Option(help="Seconds that an app may take for an answer.")] = 3600.0,
    poll: Annotated[float, typer.Option(help="Seconds between two questions to the SuperLink.")] = 1.0,
) -> None:
    """Run a SuperNode that enforces the site's own limits. Other options go to flower-supernode.

    Which apps may run, what may leave, how it is clipped, randomised and charged is decided by this process, not by the uploaded
    app.
    """
    os.environ.update(_QUIET)
    from dpfedexp.flower.node.guard import Guard
    from dpfedexp.flower.node.seam import Seam, run_node
    from dpfedexp.flower.node.site import Site

    require(patience > 0 and poll > 0, f"patience is {patience:g} and poll is {poll:g}; both must be positive.")
    limits = Guard.load(guard.expanduser().resolve())
    require(
        bool(limits.apps),
        f"{str(guard)!r} lists no apps; put the hash that `dpfedexp flower hash` prints into apps = […], once it has been read.",
    )
    check_private(limits.path)
    os.environ.pop("DPFEDEXP_GUARD", None)  # the app's processes inherit this environment
    run_node(context.args, Seam(Site(limits), patience, poll))


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
    from dpfedexp.flower.link.superlink import serve

    serve(context.args, fleet=fleet, control_port=control_port, nodes=nodes, insecure=insecure)


def check_private(path: Path) -> None:
    """The guard file and its folder can be written by the site's user and group alone, or who else can would set the limits."""
    for place in (path, path.parent):
        found = place.stat()
        sticky = place.is_dir() and found.st_mode & stat.S_ISVTX
        writable = 0o002 if found.st_gid == os.getegid() else 0o022
        if found.st_mode & writable and not sticky:
            raise InputError(
                f"{str(place)!r} can be written by others than its owner (mode {stat.S_IMODE(found.st_mode):o}); "
                f"chmod go-w {place}"
            )
