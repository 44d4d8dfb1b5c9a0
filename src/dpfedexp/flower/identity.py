"""Who a node is: an id that follows from its public key, so that it is the same after every restart and on every SuperLink.

Flower draws a node's id when its key is registered and forgets it with its database. Here the id is the first 63 bits of the hash
of the key, so a list of keys is a list of ids: the SuperLink lets these nodes in, and a run asks these nodes and no others.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

from dpfedexp.errors import InputError, require

_FEWEST = 2
"""Flower keeps 0 and 1 for itself."""


def node_id(public_key: bytes) -> int:
    """The id of the node with this key, as Flower writes keys (PEM)."""
    return max(_FEWEST, int.from_bytes(hashlib.sha256(b"dpfedexp-node\0" + public_key).digest()[:8], "big") >> 1)


def read_keys(path: Path | str) -> list[bytes]:
    """The public keys in a file, one to a line as `ssh-keygen` writes them; # begins a comment."""
    keys = [_key(path, number, line) for number, line in _lines(path) if not line.isdecimal()]
    require(len(set(keys)) == len(keys), f"{str(path)!r} names a key twice.")
    return keys


def read_nodes(path: Path | str) -> tuple[int, ...]:
    """The ids of the nodes in a file of public keys, sorted. A node without a key of its own is a line with its id."""
    ids = [int(line) if line.isdecimal() else node_id(_key(path, number, line)) for number, line in _lines(path)]
    require(bool(ids), f"{str(path)!r} names no node; it has a public key on each line.")
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
    try:
        key = load_ssh_public_key(line.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise InputError(
            f"{str(path)!r}, line {number}: not a public key of a node; make one with ssh-keygen -t ecdsa -b 384, and copy the "
            "line of its .pub file."
        )
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
