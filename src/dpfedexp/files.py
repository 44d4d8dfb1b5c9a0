"""Atomic writes of files.

The new content is written beside the old file, synced, and renamed over it, and the folder is synced: killed at any instant, what
lies under the name is the old file or the new one, complete.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def replace_file(path: Path, write: Callable[[Path], object], mode: int | None = None) -> None:
    """Replaces a file, which need not exist yet, by the one that `write(temporary)` makes in the same folder.

    The new file has the access rights `mode` from the first byte on; by default those that the user's umask gives, without the
    right to write for other users. After an `OSError` the old file is as it was, and no temporary file is left.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode))
        # Before it is written: what writes it may make the file anew, with rights of its own.
        rights = temporary.stat().st_mode & 0o755 if mode is None else mode
        write(temporary)
        os.chmod(temporary, rights)
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def replace_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    replace_file(path, lambda temporary: temporary.write_bytes(data), mode)


def replace_text(path: Path, text: str, mode: int | None = None) -> None:
    replace_bytes(path, text.encode("utf-8"), mode)


def replace_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None, mode: int | None = None
) -> None:
    """Replaces a safetensors file. `OSError` where it can't be written, as for every other file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        try:
            save_file(dict(tensors), temporary, metadata)
        except SafetensorError as error:
            raise OSError(None, str(error).removeprefix("Error while serializing: ")) from None

    replace_file(path, write, mode)


def create_file(path: Path, data: bytes) -> None:
    """A new file that appears with all its content, or not at all. `FileExistsError` where there is one already."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        _sync(temporary)
        try:
            os.link(temporary, path)
        except OSError as error:
            if isinstance(error, FileExistsError) or path.exists():
                raise FileExistsError(path) from None
            os.replace(temporary, path)  # a file system without hard links
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def try_lock(descriptor: int) -> bool:
    """Takes the exclusive lock of an open file, which ends when the file is closed or its process dies.

    Whether it is taken: False where the system or the file system has no locks. `BlockingIOError` where another process, or
    another opening of the file in this one, holds it.
    """
    try:
        import fcntl
    except ImportError:
        return False
    # A process that asks whether a run is alive holds the lock for a moment too.
    for left in range(5, -1, -1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not left:
                raise
            time.sleep(0.05)
        except OSError:  # some network file systems have no locks
            return False
    return False


def set_dates(folder: Path, names: Iterable[str], when: float) -> None:
    """Set one date on a folder and its files, so that copies do not reveal how long the work took."""
    for path in [*(path for name in names for path in folder.glob(name)), folder]:
        # A file that is missing or belongs to another user was not written by this run.
        with suppress(FileNotFoundError, PermissionError):
            os.utime(path, (when, when))


def finite(value: Any) -> Any:
    """The value with null for every number that JSON has no word for, in lists and mappings too.

    >>> finite({"epsilon": float("inf"), "history": [1.0, float("nan")]})
    {'epsilon': None, 'history': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
