"""What other users of the same machine can reach of a site: its files, its connections, and what a crash leaves behind."""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import shlex
import socket
import stat
import sys
from collections.abc import Iterable
from pathlib import Path

from dpfedexp.errors import InputError, require

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
"""Where Linux lists TCP sockets with the users who opened them."""
_ESTABLISHED = "01"
_PR_SET_DUMPABLE = 4
_FLOWERS = {b"flower-superexec", b"flwr-clientapp"}
"""Programs of Flower's that have an app's data or start what has them. Our own forbid cores themselves."""

Address = tuple[str, int]


def check_file(path: Path, most: int, *, owned: bool = True) -> None:
    """Refuses a file that other users can reach, with the command that closes it, and folders where they could exchange it.

    Args:
        path: a file.
        most: the mode that it may have at most. Rights of this process's own group count as its own.
        owned: whether it must belong to this process's user or to root.
    """
    path = path.expanduser().resolve()
    _check(path, most, owned)
    for folder in path.parents:
        _check(folder, 0o755, owned=True)


def check_folder(path: Path) -> None:
    """Refuses a folder that other users can write to, itself or one above it, with the command that closes it."""
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
    """Neither this process nor one that it starts leaves its memory on disk when it crashes.

    The limit is inherited. That other processes of the same user may not look into this one, nor a handler of core dumps, ends
    with the next program, which has to ask for it itself.
    """
    with contextlib.suppress(ImportError):  # POSIX only
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def core_dumpers(user: int) -> list[int]:
    """Processes of a user that run Flower's own programs for apps and may dump core, as far as Linux tells."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")[:2]  # the interpreter and the program
            runs = any(os.path.basename(word) in _FLOWERS for word in words)
            if runs and _owner(entry) == user and _core_limit(entry) != ("0", "0"):
                found.append(int(entry.name))
    return sorted(found)


def _owner(process: Path) -> int:
    """Of a process; the folder of one that can't be dumped is root's."""
    lines = (process / "status").read_text(encoding="ascii", errors="replace").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Uid:"))


def _core_limit(process: Path) -> tuple[str, str]:
    lines = (process / "limits").read_text(encoding="ascii").splitlines()
    soft, hard = next(line for line in lines if line.startswith("Max core file size")).split()[4:6]
    return soft, hard


def peer(client: Address | None, server: Address | None) -> str | None:
    """Who is at the other end of a connection: a user of this machine, or the address of another machine.

    Only Linux tells users; elsewhere all processes of this machine are one. None where nothing is known.

    Args:
        client: the other end's address and port.
        server: this end's.
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
    """The user who opened the other end, where that is on this machine."""
    owners = set()
    for table, family in zip(TABLES, (socket.AF_INET, socket.AF_INET6), strict=True):
        try:
            wanted = [_written(client, family), _written(server, family), _ESTABLISHED]
            lines = table.read_text(encoding="ascii").splitlines()[1:]
        except (OSError, ValueError):
            continue
        # Established only: a socket that its owner has closed already is listed as root's.
        owners |= {int(fields[7]) for fields in map(str.split, lines) if fields[1:4] == wanted}
    return owners.pop() if len(owners) == 1 else None


def _written(address: Address, family: socket.AddressFamily) -> str:
    """As /proc/net/tcp and tcp6 write it: words of four bytes in the machine's byte order. `ValueError` where it can't be."""
    found = ipaddress.ip_address(address[0].partition("%")[0])
    mapped = getattr(found, "ipv4_mapped", None)
    if family == socket.AF_INET6 and found.version == 4:
        found = ipaddress.ip_address(f"::ffff:{found}")
    elif family == socket.AF_INET and found.version == 6:
        if mapped is None:
            raise ValueError(address)
        found = mapped
    packed = found.packed
    words: Iterable[bytes] = (packed[i : i + 4] for i in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words) + f":{address[1]:04X}"
