"""The ledger beside a guard file, which is never silently begun anew.

    guard.toml                    the limits
    guard.ledger.jsonl (+ .head)  what was charged
    guard.anchor.json             how many charges the ledger held when it was last used, and the hash of the last one

The anchor is written, durably, after the charge and before the answer exists. A crash in between leaves the ledger ahead of its
anchor, which is fine: the charge is kept. A ledger that is behind its anchor, missing beside it, or another one was deleted,
restored from an old copy or exchanged, and the node refuses to answer with it.

All three may be put back together, by a restored back-up of the whole folder, or taken away together. Where the node's user has a
state folder (`dpfedexp.runs.private.private_folder`), two more anchors lie there and notice: one that is named by the ledger, and
one by the place where it lies. Where there is none, nothing can.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from dpfedexp.accounting import Ledger
from dpfedexp.accounting.chain import head_path
from dpfedexp.accounting.ledger import Mark
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.runs.private.anchor import read_mark, write_mark
from dpfedexp.runs.private.private_folder import SharedAnchor

_BEFORE_ANCHORS = 1
"""The version of ledgers that were written before there were anchors."""


def anchor_path(guard: Path) -> Path:
    return guard.with_name(guard.stem + ".anchor.json")


@contextlib.contextmanager
def guard_ledger(guard: Path, path: Path) -> Iterator[Ledger]:
    """The ledger at `path`, for one message at a time: two runs on one node must not both pass the same check.

    Its anchor has caught up with it when the context ends without an error.
    """
    lock = os.open(guard.with_name(guard.stem + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(ImportError):  # advisory locks exist on POSIX only
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        anchor = anchor_path(guard)
        with _open(path, anchor) as ledger:
            before = ledger.mark()
            yield ledger
            if ledger.mark() != before:
                _write(anchor, path, ledger)
    finally:
        os.close(lock)


def _open(path: Path, anchor: Path) -> Ledger:
    if not path.exists():
        check_missing(path, anchor)
        ledger = Ledger.create(path, holder=secrets.token_hex(8))
        _write(anchor, path, ledger)
        return ledger
    ledger = Ledger.open(path, repair=True)
    try:
        mark = check_marks(path, anchor, ledger)
        if mark is None or ledger.mark() != mark:
            _write(anchor, path, ledger)
    except BaseException:
        ledger.close()
        raise
    return ledger


def check_missing(path: Path, anchor: Path) -> None:
    """Raises `LedgerError` if there was a ledger where none is."""
    traces = [p.name for p in (anchor, head_path(path)) if p.exists()]
    if traces:
        raise LedgerError(
            f"{path.name} is missing beside {' and '.join(traces)}; restore it from a back-up, or, if what was spent is "
            "to be forgotten knowingly, delete those too."
        )
    _check_place(path, None)


def check_marks(path: Path, anchor: Path, ledger: Ledger) -> Mark | None:
    """The mark in the anchor. Raises `LedgerError` if the ledger is not the newest one that this machine knows of."""
    mark = _read(anchor)
    if mark is None and len(ledger) and ledger.header["version"] != _BEFORE_ANCHORS:
        raise LedgerError(
            f"{anchor.name} is missing beside a ledger with {len(ledger)} charges, so an older copy would go unnoticed; "
            f"restore it from a back-up, or, if this ledger is known to be the newest, copy {head_path(path).name} to "
            f"{anchor.name}."
        )
    if mark is not None and not ledger.holds(mark):
        age = "an older copy" if len(ledger) < mark.count else "another ledger"
        raise LedgerError(
            f"{path.name} is {age}: it holds {len(ledger)} charges, and its anchor {anchor.name} was written after "
            f"{mark.count}; restore the newest ledger with its {head_path(path).name} from a back-up."
        )
    _check_outside(path, ledger)
    return mark


def _check_outside(path: Path, ledger: Ledger) -> None:
    outside, known = _seen(ledger.first_hash)
    if known is not None and not ledger.holds(known):
        raise LedgerError(
            f"{path.name} was put back together with its anchor: it holds {len(ledger)} charges, and {str(outside)!r} has "
            f"seen {known.count}; restore the newest ledger with its head and anchor, or, if what was spent since is to be "
            "forgotten knowingly, delete that file."
        )
    _check_place(path, ledger)


def _check_place(path: Path, ledger: Ledger | None) -> None:
    """Whatever ledger was charged at this place before is this one; None stands for no ledger at all."""
    outside, known = _seen(_place(path))
    if known is not None and known.count and (ledger is None or not ledger.holds(known)):
        raise LedgerError(
            f"{path.name} is {'missing' if ledger is None else 'another ledger'}, and {str(outside)!r} has seen {known.count} "
            "charges at this place; restore that ledger with its head and anchor, or, if what was spent is to be forgotten "
            "knowingly, delete that file."
        )


def _seen(name: str) -> tuple[Path | None, Mark | None]:
    """What the state folder knows under a name, and the file that says so."""
    try:
        outside = SharedAnchor.of(name)
        return outside.path, outside.mark()
    except InputError as error:
        raise LedgerError(str(error)) from None
    except RuntimeError:  # a user without a home has no state folder
        return None, None


def _place(path: Path) -> str:
    return hashlib.sha256(b"dpfedexp ledger at\0" + os.fsencode(path.resolve())).hexdigest()


def _write(anchor: Path, path: Path, ledger: Ledger) -> None:
    mark = ledger.mark()
    write_mark(anchor, mark)
    with contextlib.suppress(OSError, RuntimeError):  # an older one outside is still a witness
        for name in (ledger.first_hash, _place(path)):
            SharedAnchor.of(name).remember(mark)


def _read(anchor: Path) -> Mark | None:
    try:
        mark = read_mark(anchor)
    except FileNotFoundError:
        return None
    if mark is None:
        raise LedgerError(f"{anchor.name} was changed after it was written; restore it from a back-up with its ledger.")
    return mark
