"""Files that are replaced as a whole, or not at all.

The new content is written beside the old file, synced, and renamed over it, and the folder is synced: killed at any instant, what
lies under the name is the old file or the new one, complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError


def replace_file(path: Path, write: Callable[[Path], None], mode: int = 0o644) -> None:
    """`write(temporary)` makes the new file. An `OSError` leaves the old one as it was, and no temporary file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        os.chmod(temporary, mode)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except SafetensorError as error:
        temporary.unlink(missing_ok=True)
        raise OSError(None, str(error).removeprefix("Error while serializing: ")) from None
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str, mode: int = 0o644) -> None:
    replace_file(path, lambda temporary: _write(temporary, text), mode)


def undate(folder: Path, names: Iterable[str], when: float) -> None:
    """Gives files of a folder one date, so that whoever gets copies of them can't see how long what lay between them took."""
    for path in (folder / name for name in names):
        # A file that is not there, or that belongs to somebody else, is none that this run has written.
        with suppress(FileNotFoundError, PermissionError):
            os.utime(path, (when, when))


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
