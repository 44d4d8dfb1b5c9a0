"""The ledger of a guard, which is never silently begun anew.

    guard.toml                    the limits, and the id by which the guard is known wherever it lies
    guard.ledger.jsonl (+ .head)  what was charged; its first line has the same id
    guard.anchor.json             how many charges the ledger held when it was last used, and the hash of the last one

The id is drawn at the first use and written into the guard file, unless the operator has put one there. A guard file that was
renamed finds its ledger by the id. One that was copied or moved without its ledger is refused, and so is a ledger of another id.

The anchor is written, durably, after the charge and before the answer exists. A crash in between leaves the ledger ahead of its
anchor, which is fine: the charge is kept. A ledger that is behind its anchor, missing beside it, or another one was deleted,
restored from an old copy or exchanged, and the node refuses to answer with it.

All of it may be put back or copied together. So the user's state folder (`dpfedexp.engine.private_folder`) has two more
anchors: one that is named by the id, and one by the place where the ledger lies. The first is locked while a ledger of this id is
in use and changes only from what was read under the lock: of two copies, the one that is behind is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dpfedexp.accounting import Ledger
from dpfedexp.accounting.ledger import Mark, head_path
from dpfedexp.engine.private_folder import SharedAnchor, read_mark, write_mark
from dpfedexp.errors import InputError, LedgerError

_DRAWN = re.compile(r"[0-9a-f]{16}")
"""Ids of this form are drawn when the ledger is created, so a guard file that has one has been used."""
_LEDGER, _ANCHOR, _LOCK = ".ledger.jsonl", ".anchor.json", ".lock"
_LARGEST_HEADER = 64 * 1024


@dataclass(frozen=True)
class Place:
    """Where a guard's ledger lies, or would lie.

    Args:
        guard: the guard file.
        ledger: its ledger, which need not exist.
        id: by which both are known; None before the first use.
        stated: whether the guard file says so itself.
    """

    guard: Path
    ledger: Path
    id: str | None
    stated: bool

    @staticmethod
    def of(guard: Path) -> Place:
        """By the guard file's name, or by its id where it was renamed. Raises `LedgerError` where the two contradict."""
        stated = _stated_id(guard)
        path = guard.with_name(guard.stem + _LEDGER)
        if path.exists():
            found = _ledger_id(path)
            if None not in (stated, found) and found != stated:
                raise LedgerError(
                    f"{path.name} is another ledger: it belongs to the guard with id {found!r}, and {guard.name} has id "
                    f"{stated!r}; put the ledger of {stated!r} here, with its head and anchor."
                )
            return Place(guard, path, found or stated, stated is not None)
        if stated is not None:
            others = (other for other in sorted(guard.parent.glob("*" + _LEDGER)) if _ledger_id(other) == stated)
            path = next(others, path)
        return Place(guard, path, stated, stated is not None)

    @property
    def files(self) -> list[Path]:
        """What there is of the ledger, its head, its anchor and the guard's lock."""
        lock = self.guard.with_name(self.guard.stem + _LOCK)
        return [path for path in (self.ledger, head_path(self.ledger), self.anchor, lock) if path.exists()]

    @property
    def anchor(self) -> Path:
        return self.ledger.with_name(self.ledger.name.removesuffix(_LEDGER) + _ANCHOR)


@contextlib.contextmanager
def guard_ledger(guard: Path) -> Iterator[Ledger]:
    """The ledger of a guard file, for one message at a time: two runs on one node must not both pass the same check.

    Its anchors have caught up with it when the context ends without an error.
    """
    with _locked(guard.with_name(guard.stem + _LOCK)):
        place = Place.of(guard)
        name = secrets.token_hex(8) if place.id is None else place.id
        outside = _outside(name)
        outside.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(outside.path.with_suffix(_LOCK)):
            # Once more: a copy beside this guard may have begun the ledger meanwhile.
            place = Place.of(guard)
            with _open(place, name) as ledger:
                seen, before = _seen(outside), ledger.mark()
                yield ledger
                if ledger.mark() != before:
                    _remember(place, outside, seen, ledger)


def read_ledger(place: Place) -> Ledger | None:
    """The ledger for reading, None before the first use. Raises `LedgerError` where the node would refuse it."""
    if not place.ledger.exists():
        _check_missing(place)
        return None
    ledger = Ledger.open(place.ledger, read_only=True)
    _check_marks(place, ledger)
    return ledger


def _open(place: Place, name: str) -> Ledger:
    if not place.ledger.exists():
        _check_missing(place)
        return _create(place, name)
    ledger = Ledger.open(place.ledger, repair=True)
    try:
        outside, mark = _outside(name), _check_marks(place, ledger)
        if not place.stated:
            with contextlib.suppress(OSError):  # the ledger beside it has the id
                _write_id(place.guard, name)
        seen = _seen(outside)
        if not mark == seen == ledger.mark():
            _remember(place, outside, seen, ledger)
    except BaseException:
        ledger.close()
        raise
    return ledger


def _create(place: Place, name: str) -> Ledger:
    ledger = Ledger.create(place.ledger, holder=name)
    try:
        place.ledger.chmod(0o600)
        if not place.stated:
            _write_id(place.guard, name)
    except OSError as error:
        ledger.close()
        for path in (place.ledger, head_path(place.ledger)):
            path.unlink(missing_ok=True)
        raise LedgerError(
            f"{place.guard.name} has no id, and one can't be written into it ({error.strerror}); add a line such as "
            'id = "ward 7", with a name that no other guard has.'
        ) from None
    outside = _outside(name)
    _remember(place, outside, _seen(outside), ledger)
    return ledger


def _check_missing(place: Place) -> None:
    """Raises `LedgerError` if there was a ledger where none is."""
    traces = [p.name for p in (place.anchor, head_path(place.ledger)) if p.exists()]
    if traces:
        raise LedgerError(
            f"{place.ledger.name} is missing beside {' and '.join(traces)}; restore it from a back-up, or, if what was spent is "
            "to be forgotten knowingly, delete those too."
        )
    if place.id is not None:
        outside = _outside(place.id)
        seen = _seen(outside)
        if (seen is None and _DRAWN.fullmatch(place.id)) or (seen is not None and seen.count):
            count = f" {seen.count} times, as {str(outside.path)!r} has seen" if seen else ""
            raise LedgerError(
                f"{place.guard.name} was charged before{count} (id {place.id!r}), and its ledger is not beside it; move "
                f"{place.ledger.name}, its .head and its {place.anchor.name} here from where the guard was used, or, if what was "
                "spent is to be forgotten knowingly, take the line id out of the guard file."
            )
    _check_place(place, None)


def _check_marks(place: Place, ledger: Ledger) -> Mark | None:
    """The mark in the anchor. Raises `LedgerError` if the ledger is not the newest one that this user knows of."""
    mark, path, anchor = _read(place.anchor), place.ledger, place.anchor
    if mark is None and len(ledger):
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
    if place.id is None:
        raise LedgerError(f"{path.name} has no id in its first line; it is no ledger of a guard.")
    outside = _outside(place.id)
    known = _seen(outside)
    if known is not None and not ledger.holds(known):
        raise LedgerError(
            f"{path.name} holds {len(ledger)} charges, and {str(outside.path)!r} has seen {known.count} of the guard with id "
            f"{place.id!r}: another copy of it was charged since, or this one was put back together with its anchor. Go on with "
            "the newest ledger, head and anchor, or, if what was spent since is to be forgotten knowingly, delete that file."
        )
    _check_place(place, ledger)
    return mark


def _check_place(place: Place, ledger: Ledger | None) -> None:
    """Whatever ledger was charged at this place before is this one; None stands for no ledger at all."""
    outside = _anchor_of(_place_name(place.ledger))
    known = _seen(outside)
    if known is not None and known.count and (ledger is None or not ledger.holds(known)):
        raise LedgerError(
            f"{place.ledger.name} is {'missing' if ledger is None else 'another ledger'}, and {str(outside.path)!r} has seen "
            f"{known.count} charges at this place; restore that ledger with its head and anchor, or, if what was spent is to be "
            "forgotten knowingly, delete that file."
        )


def _remember(place: Place, outside: SharedAnchor, seen: Mark | None, ledger: Ledger) -> None:
    """Moves the anchors to where the ledger stands, if the one of the id is still where it was read."""
    if _seen(outside) != seen:
        raise LedgerError(
            f"{str(outside.path)!r} was changed while {place.ledger.name} was in use; nothing is answered."
        )
    mark = ledger.mark()
    write_mark(place.anchor, mark, 0o600)
    for anchor in (outside, _anchor_of(_place_name(place.ledger))):
        anchor.remember(mark)


def _outside(name: str) -> SharedAnchor:
    """The anchor of an id, in the user's state folder."""
    return _anchor_of(hashlib.sha256(b"dpfedexp guard\0" + name.encode()).hexdigest())


def _anchor_of(name: str) -> SharedAnchor:
    try:
        return SharedAnchor.of(name)
    except (InputError, RuntimeError) as error:
        raise LedgerError(str(error)) from None


def _seen(outside: SharedAnchor) -> Mark | None:
    try:
        return outside.mark()
    except InputError as error:
        raise LedgerError(str(error)) from None


def _place_name(path: Path) -> str:
    return hashlib.sha256(b"dpfedexp ledger at\0" + os.fsencode(path.resolve())).hexdigest()


def _read(anchor: Path) -> Mark | None:
    try:
        mark = read_mark(anchor)
    except FileNotFoundError:
        return None
    if mark is None:
        raise LedgerError(f"{anchor.name} was changed after it was written; restore it from a back-up with its ledger.")
    return mark


def _stated_id(guard: Path) -> str | None:
    """The id in a guard file."""
    try:
        found = tomllib.loads(guard.read_text(encoding="utf-8")).get("id")
    except (OSError, ValueError) as error:
        raise LedgerError(f"the guard file {str(guard)!r} can't be read: {error}") from None
    return None if found is None else str(found)


def _write_id(guard: Path, name: str) -> None:
    """In place, so that the file keeps its owner and its mode."""
    text = guard.read_text(encoding="utf-8")
    with open(guard, "a", encoding="utf-8") as file:
        file.write("" if text.endswith("\n") else "\n")
        file.write(f'id = "{name}"  # of this guard and its ledger, drawn at the first use\n')
        file.flush()
        os.fsync(file.fileno())


def _ledger_id(path: Path) -> str | None:
    """The id in a ledger's first line, unchecked; opening the ledger checks it."""
    try:
        with open(path, "rb") as file:
            header = json.loads(file.readline(_LARGEST_HEADER))
        return str(header["holder"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """While the file is locked; others wait."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(ImportError):  # advisory locks exist on POSIX only
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
