"""Atomic writes of files.

The new content is written to a temporary file beside the old one, synced, and renamed over it, and the folder is synced. If the
process is killed at any time, the path holds either the complete old file or the complete new one.
"""

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpfedexp.errors import InputError, LedgerError

if TYPE_CHECKING:
    from torch import Tensor


def replace_file(path: Path, write: Callable[[Path], object], mode: int | None = None) -> None:
    """Create or replace a file atomically; `write(temporary)` writes the new content to a path in the same folder.

    The new file has the permissions `mode` from its first byte on; by default those of the user's umask, without write permission
    for group and others. After an `OSError` the old file is unchanged, and no temporary file is left.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.unlink(missing_ok=True)
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else mode))
        # Read before `write`, which may create the file again with other permissions.
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
    path: Path, tensors: "Mapping[str, Tensor]", metadata: dict[str, str] | None = None, mode: int | None = None
) -> None:
    """Create or replace a safetensors file atomically; raise `OSError` if it can't be written."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def write(temporary: Path) -> None:
        try:
            save_file(dict(tensors), temporary, metadata)
        except SafetensorError as error:
            raise OSError(None, str(error).removeprefix("Error while serializing: ")) from None

    replace_file(path, write, mode)


def create_file(path: Path, data: bytes) -> None:
    """Create a file that appears with all its content or not at all; raise `FileExistsError` if it exists."""
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
    """Take the exclusive lock of an open file, which is released when the file is closed or the process ends.

    Returns True if the lock was taken, False if the system or the file system has no locks. Raises `BlockingIOError` if another
    process, or another descriptor of this process, holds the lock.
    """
    try:
        import fcntl
    except ImportError:
        return False
    # Retry: a process that checks whether a run is alive holds the lock for a moment.
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


@contextmanager
def writing(
    what: Path | str, to: str = "", remedy: str = ".", kind: type[InputError | LedgerError] = InputError
) -> Iterator[None]:
    """Raise `kind` for an `OSError` inside: `what` (a folder, or words) can't be written `to`, the reason, and the remedy."""
    try:
        yield
    except OSError as error:
        named = f"the folder {str(what)!r}" if isinstance(what, Path) else what
        raise kind(f"{named} can't be written{to}: {error.strerror}{remedy}") from None


def set_dates(folder: Path, names: Iterable[str], when: float) -> None:
    """Set one date on a folder and its files, so that copies do not reveal how long the work took."""
    for path in [*(path for name in names for path in folder.glob(name)), folder]:
        # A file that is missing or belongs to another user was not written by this run.
        with suppress(FileNotFoundError, PermissionError):
            os.utime(path, (when, when))


def finite(value: Any) -> Any:
    """Replace every infinite or NaN float by None (JSON null), also inside lists and dictionaries.

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
