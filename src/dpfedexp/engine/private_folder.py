"""What a run must remember and nobody else may see: a folder of its own, outside the folder that it writes its results to.

data.json                     a random key, and the hash under it of everything that the clients hold: a resumed run knows its data
anchor.json                   how far the ledger had come at the run's last charge: a ledger that was taken back is noticed
controls-<round>.safetensors  SCAFFOLD's own control variate of each client after that round, which is no more private than its data

It is `$DPFEDEXP_PRIVATE/<run>`, or `<run>` below `$XDG_STATE_HOME/dpfedexp` or `~/.local/state/dpfedexp`, readable by its owner
alone, and it is removed when the run has finished. `ledgers/` beside it holds the anchors of ledgers that several runs charge and
of those of secure runs, which stay. A `.lock` beside an anchor is there while a run holds it (`OneWriter`).
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError, safe_open
from torch import Tensor

from dpfedexp.accounting.ledger import Mark
from dpfedexp.engine.anchor import LARGEST_TEXT, read_mark, write_mark
from dpfedexp.errors import InputError, require
from dpfedexp.files import replace_tensors, replace_text

VARIABLE = "DPFEDEXP_PRIVATE"
NOTHING_CHARGED = Mark(0, "")
"""The anchor of a run that has no ledger yet."""
_RUN = re.compile(r"[0-9a-f]{16}")
_HASH = re.compile(r"[0-9a-f]{64}")

Content = TypeVar("Content")
Tag = Callable[[bytes], str]
"""key → the hash under it of what the clients hold."""


def root() -> Path:
    """The folder of all runs' private folders."""
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
    """Whether this names a run. Whatever does may become the name of a folder, so nothing else is let through."""
    return isinstance(text, str) and _RUN.fullmatch(text) is not None


@dataclass(frozen=True)
class PrivateFolder:
    """The private folder of one run. Everything that it holds is on disk when the method that wrote it returns."""

    run: str
    path: Path

    @staticmethod
    def of(run: str, public: Path) -> PrivateFolder:
        """The private folder of a run whose results go to the folder `public`, whether it exists or not."""
        require(is_run_id(run), f"the run is called {run!r}; a run's name is 16 hexadecimal digits.")
        path = root() / run
        require(
            not path.resolve().is_relative_to(public.resolve()),
            f"the private folder {str(root())!r} lies in the run's own folder {str(public)!r}; set {VARIABLE} to one outside.",
        )
        return PrivateFolder(run, path)

    @property
    def exists(self) -> bool:
        return self.path.exists()

    def begin(self, tag: Tag) -> None:
        """Makes the folder and remembers the data, before anything is charged."""
        key = secrets.token_bytes(32)
        with self._writing():
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.path.mkdir(mode=0o700)
            write_mark(self.file, NOTHING_CHARGED, mode=0o600)
            replace_text(self.path / "data.json", json.dumps({"key": key.hex(), "tag": tag(key)}), mode=0o600)

    def check_data(self, tag: Tag) -> None:
        """Refuses other data than the run began with, in whichever row they differ."""
        content = self._read("data.json", _read_object)
        try:
            key, expected = bytes.fromhex(content["key"]), content["tag"]
            same = secrets.compare_digest(tag(key), expected)
        except (KeyError, TypeError, ValueError):
            raise self._damaged("data.json") from None
        require(
            same,
            "the clients' data are not those that the run began with, and noise that was drawn for other data must not be used "
            "again: resume with the data as they were, or begin a new run.",
        )

    @property
    def file(self) -> Path:
        """The anchor."""
        return self.path / "anchor.json"

    def mark(self) -> Mark:
        return self._read("anchor.json", read_mark)

    def remember(self, mark: Mark) -> None:
        """Moves the anchor. An `OSError` goes to whoever charges, so that nothing is released without it."""
        write_mark(self.file, mark, mode=0o600)

    def save_controls(self, round: int, controls: Tensor) -> None:
        tensors = {"client_controls": controls.detach().cpu().contiguous()}
        with self._writing():
            replace_tensors(self._controls(round), tensors, mode=0o600)

    def load_controls(self, round: int) -> Tensor:
        path = self._controls(round)
        if not path.exists():
            raise InputError(
                f"the clients' control variates of round {round} are missing ({str(path)!r}), without which the run would not go "
                "on as it was: put the file back, or begin a new run."
            )
        try:
            with safe_open(path, framework="pt") as file:
                # A copy, because the file under a mapped tensor may be deleted.
                controls: Tensor = file.get_tensor("client_controls").clone()
                return controls
        except (SafetensorError, OSError):
            raise self._damaged(path.name) from None

    def forget_controls(self, but: int | None = None) -> None:
        """Deletes the clients' control variates, of all rounds but one where one is still needed."""
        with self._writing():
            for path in self.path.glob("controls-*"):
                if but is None or path != self._controls(but):
                    path.unlink(missing_ok=True)

    def remove(self) -> None:
        """The run is over: nothing here is needed again."""
        with self._writing():
            if self.exists:
                shutil.rmtree(self.path)

    def _controls(self, round: int) -> Path:
        return self.path / f"controls-{round}.safetensors"

    def _read(self, name: str, read: Callable[[Path], Content | None]) -> Content:
        try:
            content = read(self.path / name)
        except FileNotFoundError:
            raise InputError(
                f"the run can't be resumed: {name} of its private folder {str(self.path)!r} is missing. Copy that folder from "
                f"where the run was begun, set {VARIABLE} to the folder that holds it, or begin a new run."
            ) from None
        except OSError as error:
            raise InputError(f"the private file {str(self.path / name)!r} can't be read: {error.strerror}.") from None
        if content is None:
            raise self._damaged(name)
        return content

    def _damaged(self, name: str) -> InputError:
        return InputError(
            f"the private file {str(self.path / name)!r} is damaged: restore it from a copy, or begin a new run."
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"the run's private folder {str(self.path)!r} can't be written: {error.strerror}. "
                f"Set {VARIABLE} to a folder outside the run's own where it can."
            ) from None


@dataclass(frozen=True)
class SharedAnchor:
    """How far a ledger had come, whichever run charged it. Named by the hash of its first line."""

    path: Path

    @property
    def file(self) -> Path:
        """The anchor."""
        return self.path

    @staticmethod
    def of(first_hash: str) -> SharedAnchor:
        require(
            _HASH.fullmatch(first_hash) is not None, "a ledger's first line has no hash that could name its anchor."
        )
        return SharedAnchor(root() / "ledgers" / f"{first_hash}.json")

    def mark(self) -> Mark | None:
        """None where this machine has not seen the ledger."""
        try:
            mark = read_mark(self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise InputError(f"the private file {str(self.path)!r} can't be read: {error.strerror}.") from None
        if mark is None:
            raise InputError(f"the private file {str(self.path)!r} is damaged: restore it from a copy.")
        return mark

    def remember(self, mark: Mark) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_mark(self.path, mark, mode=0o600)


def marks_of(run: object, first_hash: str) -> list[tuple[Path, Mark]]:
    """What this machine remembers of a ledger: every anchor's file and its mark; nothing where the ledger was never charged here.

    Args:
        run: what the ledger's header calls its run.
        first_hash: of the ledger.
    """
    anchors: list[PrivateFolder | SharedAnchor] = []
    if is_run_id(run) and (root() / str(run)).exists():
        anchors.append(PrivateFolder(str(run), root() / str(run)))
    if _HASH.fullmatch(first_hash):
        anchors.append(SharedAnchor.of(first_hash))
    found = [(one.file, one.mark()) for one in anchors]
    return [(file, mark) for file, mark in found if mark is not None and mark != NOTHING_CHARGED]


def _read_object(path: Path) -> dict[str, Any] | None:
    """None where it is not a JSON object."""
    with open(path, "rb") as file:
        text = file.read(LARGEST_TEXT)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None
