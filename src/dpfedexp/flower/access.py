"""Access control: local users, node keys, request paths, and the supported versions of Flower.

A node's id is computed from its public key, so it is the same after every restart and on every SuperLink; Flower draws ids and
loses them with its database. So a list of keys is a list of ids: the SuperLink admits, and a run asks, only these nodes.
"""

import contextlib
import ctypes
import hashlib
import inspect
import ipaddress
import os
import shlex
import socket
import stat
import sys
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from dpfedexp.errors import InputError, require

VERSIONS = ("1.41.0", "1.42.0")
"""Supported versions of Flower: `dpfedexp node`, `superexec` and `superlink` rely on private functions of these versions."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Files in which Linux lists TCP sockets with their users."""
_ESTABLISHED = "01"
_PR_SET_DUMPABLE = 4
_FLOWERS = {b"flower-superexec", b"flwr-clientapp"}
"""Flower's programs that hold an app's data or start a process that does. This library's programs disable core dumps themselves."""
_SMALLEST_ID = 2
"""Smallest node id; Flower reserves 0 and 1."""

Address = tuple[str, int]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


def check_flower(command: str, module: Any, functions: Mapping[str, str]) -> None:
    """Raise `InputError` for another version of Flower than `command` supports, or for `functions` with other arguments."""
    import flwr

    changed = ""
    for name, expected in functions.items() if flwr.__version__ in VERSIONS else ():
        function = getattr(module, name, None)
        if function is None or list(inspect.signature(function).parameters) != expected.split():
            changed = f", whose {module.__name__}.{name} is {'missing' if function is None else 'another one'}"
            break
    require(
        flwr.__version__ in VERSIONS and not changed,
        f"dpfedexp {command} was made for flwr {' or '.join(VERSIONS)}, and this is {flwr.__version__}{changed}; "
        f"install flwr=={VERSIONS[-1]}.",
    )


def node_id(public_key: bytes) -> int:
    """The id of the node with this public key (PEM, as Flower writes it): the first 63 bits of the key's hash."""
    return max(_SMALLEST_ID, int.from_bytes(hashlib.sha256(b"dpfedexp-node\0" + public_key).digest()[:8], "big") >> 1)


def read_keys(path: Path | str) -> list[bytes]:
    """The public keys in a file, one per line in the format of `ssh-keygen`; # begins a comment."""
    keys = [_key(path, number, line) for number, line in _lines(path) if not line.isdecimal()]
    require(len(set(keys)) == len(keys), f"{str(path)!r} names a key twice.")
    return keys


def read_nodes(path: Path | str) -> tuple[int, ...]:
    """The sorted node ids of a file of public keys. A line may also be the id of a node without a key."""
    ids = [int(line) if line.isdecimal() else node_id(_key(path, number, line)) for number, line in _lines(path)]
    require(bool(ids), f"{str(path)!r} names no node; write one public key on each line.")
    require(len(set(ids)) == len(ids), f"{str(path)!r} names a node twice.")
    return tuple(sorted(ids))


def _lines(path: Path | str) -> list[tuple[int, str]]:
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"the list of nodes {str(path)!r} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise InputError(f"the list of nodes {str(path)!r} is not text.") from None
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
    return [(number, line) for number, line in lines if line and not line.startswith("#")]


def _key(path: Path | str, number: int, line: str) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    with contextlib.suppress(ValueError, UnsupportedAlgorithm):
        key = load_ssh_public_key(line.encode())
        if isinstance(key, EllipticCurvePublicKey):
            return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    raise InputError(
        f"{str(path)!r}, line {number}: not a public key of a node; make one with ssh-keygen -t ecdsa -b 384, and copy the "
        "line of its .pub file."
    )


def parse_address(address: str, name: str) -> tuple[str, int]:
    """Split an IP address and a port, such as 0.0.0.0:9092 or [::]:9092, into host and port; `name` is for the error."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        ipaddress.ip_address(host)
        number = int(port)
    except ValueError:
        number = 0
    if not 1 <= number <= 65535:
        raise InputError(f"{name} is {address!r}; it must be an IP address and a port, such as 127.0.0.1:9092.")
    return host, number


def check_file(path: Path, most: int, *, owned: bool = True) -> None:
    """Raise `InputError`, with the command that fixes it, if other users can access a file or replace it in its folder.

    `most` is the largest mode allowed. If `owned`, the file must belong to this process's user or to root.
    """
    path = path.expanduser().resolve()
    _check(path, most, owned)
    check_folder(path.parent)


def check_folder(path: Path) -> None:
    """Raise `InputError`, with the command that fixes it, if other users can write to a folder or to one above it."""
    for folder in (path.resolve(), *path.resolve().parents):
        _check(folder, 0o755, owned=True)


def _check(path: Path, most: int, owned: bool) -> None:
    try:
        found = path.stat()
    except OSError as error:
        raise InputError(f"{str(path)!r} can't be read: {error.strerror}.") from None
    mode, name, own = stat.S_IMODE(found.st_mode), shlex.quote(str(path)), os.geteuid()
    require(
        not owned or found.st_uid in (0, own),
        f"{str(path)!r} belongs to another user (id {found.st_uid}), who can change it: chown {own} {name}",
    )
    if stat.S_ISDIR(found.st_mode) and mode & stat.S_ISVTX:
        return
    more = mode & ~most & (stat.S_IRWXO if found.st_gid == os.getegid() else stat.S_IRWXG | stat.S_IRWXO)
    if more:
        done = "written" if more & (stat.S_IWGRP | stat.S_IWOTH) else "read"
        fix = "go-w" if stat.S_ISDIR(found.st_mode) else f"{most:o}"
        raise InputError(
            f"{str(path)!r} can be {done} by other users of this machine (its mode is {mode:o}): chmod {fix} {name}"
        )


def forbid_core_dumps() -> None:
    """Disable core dumps of this process and its children. PR_SET_DUMPABLE is lost on exec, so a new program must call this too."""
    with contextlib.suppress(ImportError):  # POSIX only
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def core_dumpers(user: int) -> list[int]:
    """Ids of a user's processes that run Flower's programs for apps and may dump core; empty where /proc does not tell."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")[:2]  # the interpreter and the program
            if not any(os.path.basename(word) in _FLOWERS for word in words):
                continue
            # The /proc folder of a process without core dumps belongs to root, so its status file names the owner.
            owner, limits = _field(entry / "status", "Uid:")[1], _field(entry / "limits", "Max core file size")[4:6]
            if int(owner) == user and limits != ["0", "0"]:
                found.append(int(entry.name))
    return sorted(found)


def _field(path: Path, name: str) -> list[str]:
    """The words of the line of a file in /proc that begins with this name."""
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    return next(line for line in lines if line.startswith(name)).split()


def peer(client: Address | None, server: Address | None) -> str | None:
    """Identify the other end, `client`, of a connection: "user <id>" on this machine, or another machine's IP address.

    Only Linux identifies users; elsewhere every process of this machine is "user". None where nothing is known.
    """
    if client is None or server is None:
        return None
    user = _user(client, server)
    if user is not None:
        return f"user {user}"
    here = ipaddress.ip_address(client[0].partition("%")[0])
    mapped = getattr(here, "ipv4_mapped", None)
    if (mapped or here).is_loopback or client[0] == server[0]:
        return None if TABLES[0].exists() else "user"
    return str(here)


def _user(client: Address, server: Address) -> int | None:
    """The user id of the other end of a connection, if it is on this machine; None otherwise."""
    owners = set()
    for table, family in zip(TABLES, (socket.AF_INET, socket.AF_INET6), strict=True):
        try:
            wanted = [_in_table(client, family), _in_table(server, family), _ESTABLISHED]
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except (OSError, ValueError):
            continue
        # Established sockets only: a socket that was closed by its owner is listed under root.
        owners |= {int(fields[7]) for fields in map(str.split, lines) if fields[1:4] == wanted}
    return owners.pop() if len(owners) == 1 else None


def _in_table(address: Address, family: socket.AddressFamily) -> str:
    """Format an address as in /proc/net/tcp and tcp6: 4-byte words in native byte order; `ValueError` for IPv6 as IPv4."""
    found = ipaddress.ip_address(address[0].partition("%")[0])
    if family == socket.AF_INET6 and found.version == 4:
        found = ipaddress.ip_address(f"::ffff:{found}")
    elif family == socket.AF_INET:
        found = ipaddress.IPv4Address(str(getattr(found, "ipv4_mapped", None) or found))
    words = (found.packed[i : i + 4] for i in range(0, len(found.packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}"


async def answer_nothing(scope: Scope, send: Send) -> None:
    """Answer an HTTP request with 404, and close any other connection."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "websocket.close", "code": 1000})
