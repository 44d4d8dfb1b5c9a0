"""A file from the first mirror that has the right one, verified before it gets its name."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import os
import tempfile
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from dpfedexp.data.idx import GZIP_MAGIC
from dpfedexp.errors import InputError, require
from dpfedexp.files import put_in_place

_CHUNK = 1 << 16
_LARGEST = 1 << 28
"""Bytes, packed or unpacked, beyond which an answer cannot be the file that was asked for."""


class NotDownloaded(InputError):
    """No mirror gave the right file."""


class _Refused(Exception):
    """A mirror did not give the right file; the next one may."""


def cache_folder(name: str) -> Path:
    """Where the files of a data set are kept: `dpfedexp/<name>` in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpfedexp" / name


def fetch(
    name: str,
    md5: str,
    mirrors: Sequence[str],
    folder: Path,
    progress: Callable[[int, int | None], None] = lambda received, total: None,
    timeout: float = 30.0,
) -> Path:
    """`folder/name`, downloaded and found to have the md5 `md5` (of its decompressed bytes) before it appears there.

    `progress(received, total)` is called as bytes arrive; `total` is None where the mirror does not say.
    """
    require(len(mirrors) > 0, "mirrors is empty; give at least one address that begins with https://.")
    for mirror in mirrors:
        web = mirror.startswith(("https://", "http://"))
        require(web, f"mirrors holds {mirror!r}; an address begins with https:// or http://.")
    refusals = []
    for mirror in mirrors:
        try:
            return _fetch_from(f"{mirror.rstrip('/')}/{name}", name, md5, folder, progress, timeout)
        except _Refused as refusal:
            refusals.append(f"{mirror} {refusal}")
    raise NotDownloaded(f"{name} could not be downloaded: {'; '.join(refusals)}.")


def _fetch_from(
    url: str, name: str, md5: str, folder: Path, progress: Callable[[int, int | None], None], timeout: float
) -> Path:
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "dpfedexp"})
        with urllib.request.urlopen(request, timeout=timeout) as answer, _temporary(folder, name) as file:
            _receive(answer, file, folder, progress)
            _verify(file, md5)
            with _writing(folder):
                file.flush()
                put_in_place(Path(file.name), folder / name)
    except urllib.error.HTTPError as error:
        raise _Refused(f"answered {error.code} {error.reason}") from None
    except (http.client.HTTPException, ConnectionError, TimeoutError, OSError) as error:
        raise _Refused(f"failed ({getattr(error, 'reason', None) or error or type(error).__name__})") from None
    return folder / name


def _receive(
    answer: http.client.HTTPResponse, file: IO[bytes], folder: Path, progress: Callable[[int, int | None], None]
) -> None:
    length = answer.headers.get("Content-Length", "")
    total = int(length) if length.isdecimal() else None
    received = 0
    while chunk := answer.read(_CHUNK):
        received += len(chunk)
        if received > _LARGEST:
            raise _Refused(f"sent more than {_LARGEST} bytes")
        with _writing(folder):
            file.write(chunk)
        progress(received, total)
    # A connection that is cut ends the stream without an error.
    if total is not None and received < total:
        raise _Refused(f"cut the connection after {received} of {total} bytes")


def _verify(file: IO[bytes], md5: str) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    file.seek(0)
    packed = file.read(2) == GZIP_MAGIC
    file.seek(0)
    size = 0
    with gzip.open(file) if packed else contextlib.nullcontext(file) as content:
        try:
            while chunk := content.read(_CHUNK):
                size += len(chunk)
                if size > _LARGEST:
                    raise _Refused("sent another file than the one asked for (it unpacks to too much)")
                digest.update(chunk)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise _Refused(f"sent a damaged file ({error})") from None
    if digest.hexdigest() != md5:
        raise _Refused(f"sent another file than the one asked for (md5 {digest.hexdigest()}, expected {md5})")


@contextlib.contextmanager
def _temporary(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """A file beside the final one, so that renaming it is atomic; gone at the end whatever happens."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = tempfile.NamedTemporaryFile(dir=folder, prefix=f".{name}.", delete=False)  # noqa: SIM115
    try:
        yield file
    finally:
        # Closing flushes, which on a full disk fails a second time.
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.name)


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """No mirror can mend a full disk or a folder that may not be written, so these end the search."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror or error}; "
            "free space or rights there, or set XDG_CACHE_HOME to another folder."
        ) from None
