"""A file from the first mirror that has the right one, verified before it gets its name."""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from dpfedexp.data.idx import GZIP_MAGIC
from dpfedexp.errors import InputError, require
from dpfedexp.files import create_file

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


def fetch(name: str, md5: str, mirrors: Sequence[str], folder: Path, timeout: float = 30.0) -> Path:
    """`folder/name`, downloaded and found to have the md5 `md5` (of its decompressed bytes) before it appears there."""
    require(len(mirrors) > 0, "mirrors is empty; give at least one address that begins with https://.")
    for mirror in mirrors:
        web = mirror.startswith(("https://", "http://"))
        require(web, f"mirrors holds {mirror!r}; an address begins with https:// or http://.")
    refusals = []
    for mirror in mirrors:
        try:
            content = _receive(f"{mirror.rstrip('/')}/{name}", timeout)
            _verify(content, md5)
        except _Refused as refusal:
            refusals.append(f"{mirror} {refusal}")
        else:
            return _write(folder, name, content)
    raise NotDownloaded(f"{name} could not be downloaded: {'; '.join(refusals)}.")


def _receive(url: str, timeout: float) -> bytes:
    content = bytearray()
    try:
        request = urllib.request.Request(url, headers={"User-Agent": "dpfedexp"})
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            length = answer.headers.get("Content-Length", "")
            while chunk := answer.read(_CHUNK):
                content += chunk
                if len(content) > _LARGEST:
                    raise _Refused(f"sent more than {_LARGEST} bytes")
    except urllib.error.HTTPError as error:
        raise _Refused(f"answered {error.code} {error.reason}") from None
    except (http.client.HTTPException, OSError) as error:
        raise _Refused(f"failed ({getattr(error, 'reason', None) or error or type(error).__name__})") from None
    # A connection that is cut ends the stream without an error.
    if length.isdecimal() and len(content) < int(length):
        raise _Refused(f"cut the connection after {len(content)} of {length} bytes")
    return bytes(content)


def _verify(content: bytes, md5: str) -> None:
    if content.startswith(GZIP_MAGIC):
        stream = zlib.decompressobj(wbits=31)
        try:
            content = stream.decompress(content, _LARGEST)
        except zlib.error as error:
            raise _Refused(f"sent a damaged file ({error})") from None
        if stream.unconsumed_tail:
            raise _Refused("sent another file than the one asked for (it unpacks to too much)")
        if not stream.eof:
            raise _Refused("sent a damaged file (it ends too early)")
    found = hashlib.md5(content, usedforsecurity=False).hexdigest()
    if found != md5:
        raise _Refused(f"sent another file than the one asked for (md5 {found}, expected {md5})")


def _write(folder: Path, name: str, content: bytes) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # another process was faster, and its file was verified too
            create_file(folder / name, content)
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written: {error.strerror or error}; "
            "free space or rights there, or set XDG_CACHE_HOME to another folder."
        ) from None
    return folder / name
