"""Ledgers as an attacker would leave them: raw bytes, and well-formed chains whose content is anything."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path

from tests.fuzz.harness import fuzz, instrumented

with instrumented():
    from dpfedexp.accounting import Ledger, PrivacyStatement
    from dpfedexp.accounting import ledger as chain
    from dpfedexp.accounting.events import Sampling, to_json
    from dpfedexp.core.votes import within_clip
    from dpfedexp.engine import verify as verification
    from dpfedexp.errors import InputError, LedgerError
    from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, NoPrivacy, PrivUnit

# What survives a power failure is not the question here, and a thousand times as many inputs fit into the time.
os.fsync = lambda descriptor: None

FOLDER = Path(tempfile.mkdtemp()) / "run"
MECHANISMS = [
    CentralGaussian(0.3, 5.0),
    CentralGaussian(0.3, 5.0, numerator="paper", scalar_multiplier=3.0, votes=(within_clip(9.0),)),
    LocalGaussian(0.3, 0.7),
    PrivUnit(0.3, 20),
    NoPrivacy(),
]


def _lines(count: int, sampling: Sampling) -> bytes:
    header = {"format": "dpfedexp-ledger", "version": 1, "config": ""}
    charges = [
        {"seq": n + 1, "round": n + 1, "event": to_json(MECHANISMS[n % len(MECHANISMS)].event(sampling))}
        for n in range(count)
    ]
    return b"\n".join(json.dumps(line).encode() for line in [header, *charges])


def _raw(count: int) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        with Ledger.create(Path(folder) / "ledger.jsonl") as book:
            for number in range(count):
                book.charge(number + 1, MECHANISMS[0].event(Sampling()))
        return (Path(folder) / "ledger.jsonl").read_bytes() + b"\0" + (Path(folder) / "ledger.jsonl.head").read_bytes()


SEEDS = [
    *(b"S" + _lines(count, sampling) for count in (1, 2, 6) for sampling in (Sampling(), Sampling("poisson", 0.1))),
    *(b"R" + _raw(count) for count in (0, 1, 3)),
]


def one(data: bytes) -> None:
    """First byte S: lines of JSON that get their hashes here. Otherwise: the file, a zero byte, and its head."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    path = FOLDER / "ledger.jsonl"
    body, _, head = data[1:].partition(b"\0")
    if data[:1] == b"S":
        body, head = _sealed(body)
    path.write_bytes(body)
    chain.head_path(path).write_bytes(head)
    for work in (_read, _repair, _verify):
        with contextlib.suppress(InputError, LedgerError):
            work(path)


def _read(path: Path) -> None:
    with Ledger.open(path, read_only=True) as book:
        book.guarantee(1e-5)


def _repair(path: Path) -> None:
    with Ledger.open(path, repair=True) as book:
        before = len(book)
        book.charge(10**6, MECHANISMS[0].event(Sampling()))
    with Ledger.open(path, read_only=True) as again:
        assert len(again) == before + 1


def _verify(path: Path) -> None:
    statement: PrivacyStatement = verification.recompute(path.parent)
    assert statement.text
    assert verification.verify_run(path.parent)


def _sealed(body: bytes) -> tuple[bytes, bytes]:
    previous, sealed, count = chain._GENESIS, [], -1
    for line in body.split(b"\n"):
        if line[-1:] == b"}":
            text = line[:-1] + (b',"previous":"' + previous.encode() + b'"}' if sealed else b"}")
            digest = chain.hashlib.sha256(previous.encode() + text).hexdigest()
            sealed.append(text[:-1] + b',"hash":"' + digest.encode() + b'"}\n')
            previous, count = digest, count + 1
    return b"".join(sealed), json.dumps({"count": max(0, count), "hash": previous}).encode() + b"\n"


if __name__ == "__main__":
    fuzz(one, SEEDS)
