"""`dpfedexp superlink`: Flower's SuperLink, closed by default.

Formal guarantee: from the network only Fleet requests reach Flower (`listeners.py`), and where nodes authenticate, only those
signed with a listed key. A node reaches its own messages and no other's (`own_messages.py`). Nothing that a node sends is written
to disk (`state.py`).
"""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import uvicorn
from flwr.supercore.http_logging import get_uvicorn_log_config
from flwr.supercore.logger import console_handler

from dpfedexp.errors import InputError, require
from dpfedexp.flower.identity import read_keys
from dpfedexp.flower.link.address import parse_address
from dpfedexp.flower.link.listeners import Only, is_fleet, is_own_user
from dpfedexp.flower.link.own_messages import OwnMessages
from dpfedexp.flower.link.state import memory_factories
from dpfedexp.flower.versions import check_flower

flower: Any = import_module("flwr.superlink.main")
command: Any = import_module("flwr.superlink.cli.flower_superlink")

PRIVATE = {
    "create_app": ["config", "superlink_lifespan_class"],
    "get_objectstore_linkstate_factories": ["database", "federation_manager"],
}
"""Functions of Flower's that are called or replaced here, and their arguments."""
LOOPBACK = "127.0.0.1"
_OURS = {
    "--host": "--fleet",
    "--port": "--fleet",
    "--database": "no database: the state is in memory, so that no update is ever on disk",
    "--simulation": "flwr run . local",
}


def serve(options: Sequence[str], *, fleet: str, control_port: int, nodes: Path | None, insecure: bool) -> None:
    """Runs until it is stopped.

    Args:
        options: Flower's own, such as `--ssl-certfile`.
        fleet: host:port that nodes connect to.
        control_port: on loopback, for `flwr run` and for the server app.
        nodes: the public keys of the nodes that may connect, read once; needed unless `insecure`.
        insecure: without TLS, and so without knowing the nodes; for trying things on one machine.
    """
    check_flower("superlink", flower, PRIVATE)
    for option in (option.partition("=")[0] for option in options if option.startswith("--")):
        # Flower takes the beginning of an option for the whole.
        for name, instead in _OURS.items():
            require(not name.startswith(option), f"{option} is not an option of dpfedexp superlink; use {instead}.")
    host, port = parse_address(fleet, "fleet")
    require(
        not insecure or ipaddress.ip_address(host).is_loopback,
        f"fleet is {fleet!r}; without TLS it must be on loopback, such as 127.0.0.1:9092.",
    )
    if nodes is None and not insecure:
        raise InputError("nodes is missing; name a file with the public key of every node that may connect.")
    keys = [] if nodes is None else read_keys(nodes)
    own = ["--host", LOOPBACK, "--port", str(control_port), "--disable-runtime-dependency-installation"]
    own += ["--insecure"] if insecure else ["--enable-supernode-auth"]
    sys.argv = ["flower-superlink", *own, *options]
    config = command._parse_superlink_lifespan_config()
    OwnMessages().install()
    flower.get_objectstore_linkstate_factories = lambda _, manager: memory_factories(manager, keys)
    whole = flower.create_app(config, command.SuperLinkLifespan)
    given: dict[str, Any] = {
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_certfile": config.ssl_certfile,
        "log_config": get_uvicorn_log_config(console_handler.level),
        # A name that a client puts into a header is not where it comes from.
        "proxy_headers": False,
    }
    inner = uvicorn.Server(uvicorn.Config(Only(whole, is_own_user), host=LOOPBACK, port=control_port, **given))
    outer = uvicorn.Server(uvicorn.Config(Only(whole, is_fleet), host=host, port=port, lifespan="off", **given))
    asyncio.run(_both(inner, outer))


async def _both(inner: uvicorn.Server, outer: uvicorn.Server) -> None:
    """Nodes are let in when the state behind them is there; when one end stops, so does the other."""
    first = asyncio.create_task(inner.serve())
    while not (inner.started or first.done()):
        await asyncio.sleep(0.05)
    second = asyncio.create_task(outer.serve())
    await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    inner.should_exit = outer.should_exit = True
    await asyncio.gather(first, second)
