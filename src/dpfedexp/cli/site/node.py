"""`dpfedexp node` and `dpfedexp superlink`: what a site and what the server run, in front of Flower's own options."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer

from dpfedexp.errors import InputError, require

PASSES_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}
_REFUSED = {
    "--allow-runtime-dependency-installation": "would let an app bring code that its hash does not cover; install what it needs.",
    "--trusted-entities": "is Flower's own list, which refuses every local app; the guard file's apps say what may run.",
}
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
    for path in (limits.path, *limits.path.parents):
        check_private(path, stat.S_IWGRP | stat.S_IWOTH)
    check_options(context.args)
    no_core_dumps()
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

    no_core_dumps()
    serve(context.args, fleet=fleet, control_port=control_port, nodes=nodes, insecure=insecure)


def no_core_dumps() -> None:
    """Neither this process nor one that it starts leaves its memory, and the updates in it, on disk when it crashes."""
    with contextlib.suppress(ImportError):  # POSIX only
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def check_options(options: Sequence[str]) -> None:
    """Refuses what would open a site that is meant to be closed."""
    split = [word for option in options for word in (option.split("=", 1) if option.startswith("--") else [option])]
    given = dict(zip(split, [*split[1:], ""], strict=True))
    written_out(given, (*_REFUSED, "--insecure", "--isolation", "--superlink", "--auth-supernode-private-key"))
    for name, why in _REFUSED.items():
        require(name not in given, f"{name} {why}")
    host = given.get("--superlink", "127.0.0.1:").rpartition(":")[0].strip("[]")
    require(
        "--insecure" not in given or host in ("127.0.0.1", "::1", "localhost"),
        f"--insecure sends everything to {host} as it is; use TLS (--root-certificates).",
    )
    require(
        given.get("--isolation") != "process" or "--superexec-auth-secret-file" in given,
        "--isolation process needs --superexec-auth-secret-file, or any user of this machine can answer in the app's place.",
    )
    if key := given.get("--auth-supernode-private-key"):
        check_private(Path(key).expanduser(), stat.S_IRWXG | stat.S_IRWXO)


def written_out(options: Iterable[str], names: Iterable[str]) -> None:
    """Refuses short forms of these options, which Flower would take for the whole."""
    for option, name in itertools.product(options, names):
        short = option.startswith("--") and name.startswith(option) and option != name
        require(not short, f"{option} is short for {name}; write it out.")


def check_private(path: Path, bits: int) -> None:
    """Refuses a file or folder of another user, or whose mode has one of these bits; those of the site's own group are its own."""
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"{str(path)!r} can't be read: {error.strerror}.") from None
    require(
        found.st_uid in (0, os.geteuid()),
        f"{str(path)!r} belongs to another user (id {found.st_uid}), who can change it; chown it to the site's user.",
    )
    if found.st_gid == os.getegid():
        bits &= ~stat.S_IRWXG
    if stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX:
        return
    if found.st_mode & bits:
        raise InputError(
            f"{str(path)!r} can be {'read' if bits & stat.S_IROTH else 'written'} by others than the site's user (mode "
            f"{stat.S_IMODE(found.st_mode):o}); chmod go-rwx {path}"
        )
