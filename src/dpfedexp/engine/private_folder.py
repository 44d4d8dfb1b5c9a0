"""The private folder of a run: state that must be kept secret, outside the folder with its results.

data.json                     a random key, and the keyed hash of all clients' data, by which a resumed run checks its data
anchor.json                   the ledger's length and last hash at the run's last charge; detects a ledger that was rolled back
controls-<round>.safetensors  SCAFFOLD's control variate of each client after that round, which is as private as the client's data

The folder is `$DPFEDEXP_PRIVATE/<run>`, or `<run>` below `$XDG_STATE_HOME/dpfedexp` or `~/.local/state/dpfedexp`. Only its owner
can read it, and it is deleted when the run has finished. `ledgers/` beside it keeps the anchors of ledgers that several runs
charge and of secure runs' ledgers, each named by the hash of the ledger's first line. Its files `*.first` hold this hash for the
name of a run and for the path of a ledger, so that `verify` finds out a ledger whose first line was changed. A `.lock` file beside
an anchor exists while a run holds the anchor (`SingleWriter`).
"""

import hashlib
import json
import os
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpfedexp.accounting.ledger import Ledger, LedgerMark
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.files import replace_tensors, replace_text, try_lock, writing
from dpfedexp.trainers.task import Clients

VARIABLE = "DPFEDEXP_PRIVATE"
LARGEST_TEXT = 4096
NOTHING_CHARGED = LedgerMark(0, "")
"""The mark in the anchor of a run that has no ledger yet."""
_RUN = re.compile(r"[0-9a-f]{16}")
_HASH = re.compile(r"[0-9a-f]{64}")

Content = TypeVar("Content")
Tag = Callable[[bytes], str]
"""Maps a key to the keyed hash of the clients' data."""


def root() -> Path:
    """The folder that holds the private folder of every run: what a run must keep secret, outside its results."""
    if given := os.environ.get(VARIABLE):
        return Path(given).expanduser()
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    try:
        return Path(state).expanduser() / "dpfedexp"
    except RuntimeError:
        raise InputError(
            f"this user has no home folder; set {VARIABLE} to a folder for what a run must keep private."
        ) from None


def is_run_id(text: Any) -> bool:
    """Whether a text is the name of a run. A run name may become a folder name, so nothing else is accepted."""
    return isinstance(text, str) and _RUN.fullmatch(text) is not None


@dataclass(frozen=True)
class PrivateFolder:
    """The private folder of one run. Its methods sync what they write before they return."""

    path: Path

    @classmethod
    def of(cls, run: str, public: Path) -> Self:
        """The private folder of a run whose results go to the folder `public`; it need not exist."""
        require(is_run_id(run), f"the run is called {run!r}; a run's name is 16 hexadecimal digits.")
        path = root() / run
        require(
            not path.resolve().is_relative_to(public.resolve()),
            f"the private folder {str(root())!r} is inside the run's folder {str(public)!r}; set {VARIABLE} to a folder outside "
            "of it.",
        )
        return cls(path)

    def begin(self, tag: Tag) -> None:
        """Create the folder and store the hash of the data, before anything is charged."""
        key = secrets.token_bytes(32)
        with self._writing():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            write_mark(self.file, NOTHING_CHARGED)
            replace_text(self.path / "data.json", json.dumps({"key": key.hex(), "tag": tag(key)}), mode=0o600)

    def check_data(self, tag: Tag) -> None:
        content = self._read(self.path / "data.json", _read_object)
        try:
            key, expected = bytes.fromhex(content["key"]), content["tag"]
            same = secrets.compare_digest(tag(key), expected)
        except (KeyError, TypeError, ValueError):
            raise _damaged(self.path / "data.json") from None
        require(
            same,
            "the clients' data are not those that the run began with, and noise must not be reused with other data: resume with "
            "the original data, or start a new run.",
        )

    @property
    def file(self) -> Path:
        return self.path / "anchor.json"

    def mark(self) -> LedgerMark:
        return self._read(self.file, read_mark)

    def remember(self, mark: LedgerMark) -> None:
        write_mark(self.file, mark)

    def save_controls(self, round: int, controls: Tensor) -> None:
        tensors = {"client_controls": controls.detach().cpu().contiguous()}
        with self._writing():
            replace_tensors(self._controls(round), tensors, mode=0o600)

    def load_controls(self, round: int) -> Tensor:
        path = self._controls(round)
        if not path.exists():
            raise InputError(
                f"the clients' control variates of round {round} are missing ({str(path)!r}), and the run can't be resumed "
                "without them: restore the file, or start a new run."
            )
        try:
            with safe_open(path, framework="pt") as file:
                # Clone, because the memory-mapped file may be deleted.
                controls: Tensor = file.get_tensor("client_controls").clone()
                return controls
        except (SafetensorError, OSError):
            raise _damaged(path) from None

    def forget_controls(self, but: int | None = None) -> None:
        """Delete the clients' control variates of all rounds except round `but`."""
        with self._writing():
            for path in self.path.glob("controls-*"):
                if but is None or path != self._controls(but):
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        with self._writing():
            if self.path.exists():
                shutil.rmtree(self.path)

    def _controls(self, round: int) -> Path:
        return self.path / f"controls-{round}.safetensors"

    def _read(self, path: Path, read: Callable[[Path], Content | None]) -> Content:
        if (content := _read_if_present(path, read)) is None:
            raise InputError(
                f"the run can't be resumed: {path.name} of its private folder {str(self.path)!r} is missing. Copy that folder from "
                f"the machine where the run was started, set {VARIABLE} to the folder that holds it, or start a new run."
            )
        return content

    def _writing(self) -> AbstractContextManager[None]:
        remedy = f". Set {VARIABLE} to a folder outside the run's own where it can."
        return writing(f"the run's private folder {str(self.path)!r}", remedy=remedy)


@dataclass(frozen=True)
class SharedAnchor:
    """The anchor of a ledger that several runs may charge; its file is named by the hash of the ledger's first line."""

    path: Path

    @property
    def file(self) -> Path:
        return self.path

    @classmethod
    def of(cls, first_hash: str) -> Self:
        require(
            _HASH.fullmatch(first_hash) is not None, "a ledger's first line has no hash that could name its anchor."
        )
        return cls(root() / "ledgers" / f"{first_hash}.json")

    def mark(self) -> LedgerMark | None:
        """Return the mark in the anchor, which detects an older copy of the ledger; None if this machine has no anchor of it."""
        return _read_if_present(self.path, read_mark)

    def remember(self, mark: LedgerMark) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_mark(self.path, mark)


def marks_of(run: str, first_hash: str) -> list[tuple[Path, LedgerMark]]:
    """(file, mark) of every anchor of a ledger that `run` charged; empty where it was never charged on this machine."""
    anchors: list[Anchor] = []
    if is_run_id(run) and (path := root() / run).exists():
        anchors.append(PrivateFolder(path))
    if _HASH.fullmatch(first_hash):
        anchors.append(SharedAnchor.of(first_hash))
    found = [(one.file, one.mark()) for one in anchors]
    return [(file, mark) for file, mark in found if mark is not None and mark != NOTHING_CHARGED]


def _index(run: str, ledger: Path | None) -> list[Path]:
    """The files with the first hash of the ledger that a run charged, and of the ledger at a path."""
    names = [run] if is_run_id(run) else []
    names += [] if ledger is None else [hashlib.sha256(os.fsencode(ledger.resolve())).hexdigest()]
    return [root() / "ledgers" / f"{name}.first" for name in names]


def remember_ledger(first_hash: str, run: str, ledger: Path | None) -> None:
    """Remember the ledger of a run and of a path: a ledger whose first line was changed does not lead to its own anchor."""
    for file in _index(run, ledger):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_text(file, first_hash, mode=0o600)


def forget_path(ledger: Path | None) -> None:
    """Forget which ledger was at a path: a run that needs no anchor begins a new one there."""
    for file in _index("", ledger):
        file.unlink(missing_ok=True)


def other_ledgers(first_hash: str, run: str, ledger: Path | None) -> list[Path]:
    """The files that name another ledger for this run or this path, that of the run first; none if that of the run names this."""
    named = {file: file.read_text() for file in _index(run, ledger) if file.exists()}
    own = [text for file, text in named.items() if file.stem == run]
    return [] if own == [first_hash] else [file for file, text in named.items() if text != first_hash]


def _read_if_present(path: Path, read: Callable[[Path], Content | None]) -> Content | None:
    """The content of a private file; None where there is no file, `InputError` where it is damaged or can't be read."""
    try:
        content = read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"the private file {str(path)!r} can't be read: {error.strerror}.") from None
    if content is None:
        raise _damaged(path)
    return content


def _damaged(path: Path) -> InputError:
    return InputError(f"the private file {str(path)!r} is damaged: restore it from a backup, or start a new run.")


def _read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object from a file; None where the file holds none."""
    with open(path, "rb") as file:
        text = file.read(LARGEST_TEXT)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def write_mark(path: Path, mark: LedgerMark) -> None:
    """Write the mark and sync it. A caller that gets an `OSError` must not release anything."""
    replace_text(path, json.dumps({"count": mark.count, "hash": mark.hash}) + "\n", mode=0o600)


def read_mark(path: Path) -> LedgerMark | None:
    """The mark in a file; None where the file is damaged. Raises `FileNotFoundError` where there is no file."""
    values = _read_object(path)
    if values is None or not {"count", "hash"} <= values.keys():
        return None
    mark = LedgerMark(values["count"], values["hash"])
    return mark if type(mark.count) is int and mark.count >= 0 and isinstance(mark.hash, str) else None


Anchor = PrivateFolder | SharedAnchor
"""An anchor: a file outside the run's folder that keeps the ledger's mark."""


def check_newest(anchor: Anchor, ledger: Ledger, run: str) -> None:
    """Raise `LedgerError` if the ledger does not hold the mark in its anchor. A run that has not charged the ledger yet passes."""
    mark = anchor.mark()
    uncharged = mark == NOTHING_CHARGED and not any(entry.run == run for entry in ledger.entries)
    if mark is not None and not uncharged and not ledger.holds(mark):
        raise LedgerError(
            f"the run can't go on: its ledger holds {len(ledger)} charges and is not the one that had {mark.count} at the last "
            f"release ({str(anchor.file)!r} remembers it), so it was rolled back or replaced, or another copy of the run "
            "continued. Restore the newest ledger, its .head file and the checkpoint, or start a new run with a ledger that holds "
            "all charges."
        )


class SingleWriter:
    """Allow one writer of a ledger at a time, across all copies of its folder.

    The anchor's lock is held until `close`, so a second writer is refused before its clients train. Every charge moves the anchor
    by compare and swap: only if the ledger holds the mark in the anchor. On a file system without locks, a second copy that was
    opened at the same moment is refused at the latest when it charges, before anything is released.

    After a crash between the charge and the move, the ledger is ahead of its anchor; such a ledger is accepted.
    """

    def __init__(self, anchor: Anchor, run: str) -> None:
        self.anchor, self.run = anchor, run
        self._path = anchor.file.with_name(anchor.file.name + ".lock")
        descriptor = _lock(self._path)
        self._locked = descriptor is not None
        # Release the lock of a writer that is garbage collected without `close`.
        self.close = weakref.finalize(self, _unlock, self._path, descriptor)

    def check(self, ledger: Ledger) -> None:
        check_newest(self.anchor, ledger, self.run)

    def move(self, ledger: Ledger) -> None:
        """Set the anchor to the ledger's current mark; raises `LedgerError` unless the ledger is the newest copy."""
        with nullcontext() if self._locked else _exclusive(self._path.with_suffix(".moving")):
            self.check(ledger)
            self.anchor.remember(ledger.mark())


def _lock(path: Path) -> int | None:
    """Lock the file and return its descriptor; None where the file system has no locks."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            if not try_lock(descriptor):
                os.close(descriptor)
                return None
        except BlockingIOError:
            os.close(descriptor)
            raise LedgerError(
                f"the run is in use by another process, which may have a copy of its folder: it holds {str(path)!r}; wait until "
                "it ends, then continue with its folder."
            ) from None
        # The previous writer may have removed the file between opening and locking.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)


def _unlock(path: Path, descriptor: int | None) -> None:
    with suppress(OSError):  # removed with the private folder, or the system keeps open files
        path.unlink()
    if descriptor is not None:
        os.close(descriptor)


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Allow one process at a time, by creating a file exclusively, which is atomic on network file systems too."""
    for left in range(100, -1, -1):
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            break
        except FileExistsError:
            if not left:
                raise LedgerError(
                    f"{str(path)!r} exists: another copy of the run is being charged, or was killed while it was; delete the file "
                    "if no other process runs."
                ) from None
            time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


_SAMPLE, _PIECE = 64, 4096


def data_tag(clients: Clients, key: bytes) -> str:
    """The keyed hash of all clients' data, and of the first rows as `clients.gather` returns them for training."""
    digest = hashlib.blake2b(key=key, digest_size=32)
    _update(digest, [clients.sizes])
    _update(digest, clients.contents() if hasattr(clients, "contents") else _rows(clients))
    holders = torch.nonzero(clients.sizes > 0).flatten()[:_SAMPLE]
    if len(holders):
        _update(digest, _gathered(clients, holders, torch.zeros((len(holders), 1), dtype=torch.int64)))
    return digest.hexdigest()


def parameter_tag(tensor: torch.Tensor) -> str:
    """A short hash of a public tensor: the initial parameters of a run."""
    digest = hashlib.sha256()
    _update(digest, [tensor])
    return digest.hexdigest()[:16]


def _rows(clients: Clients) -> Iterator[torch.Tensor]:
    """Yield all rows of all clients, up to `_PIECE` rows at a time; clients of equal size are gathered together."""
    for size in torch.unique(clients.sizes[clients.sizes > 0]).tolist():
        alike = torch.nonzero(clients.sizes == size).flatten()
        for start in range(0, size, _PIECE):
            positions = torch.arange(start, min(start + _PIECE, size))
            for part in alike.split(max(1, _PIECE // len(positions))):
                yield from _gathered(clients, part, positions.expand(len(part), -1))


def _gathered(clients: Clients, some: torch.Tensor, positions: torch.Tensor) -> Iterable[torch.Tensor]:
    """The rows of some clients; where reading them fails, the clients' numbers instead of an error, which would be private."""
    try:
        return tree_leaves(clients.gather(some, positions, torch.device("cpu")))
    except Exception:
        return [some]


def _update(digest: Any, tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
