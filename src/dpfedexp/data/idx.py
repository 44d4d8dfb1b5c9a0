"""The IDX format of MNIST and its kin, read without trusting what the header claims."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dpfedexp.errors import InputError, checked, require

GZIP_MAGIC = b"\x1f\x8b"
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_CHUNK = 1 << 20
_LARGEST = 1 << 32
"""Bytes; well above every known IDX file, and small enough that a forged one cannot exhaust a machine."""


@checked
def read_idx(path: Path | str, dimensions: int | None = None) -> NDArray[Any]:
    """The array in an IDX file, gzipped or plain (told by its content); `dimensions` is how many it must have."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(2)
            file.seek(0)
            if magic == GZIP_MAGIC:
                with gzip.open(file) as unpacked:
                    return _read(path, unpacked, dimensions)  # type: ignore[arg-type]
            return _read(path, file, dimensions)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is a damaged gzip file ({error}); replace it with a whole copy.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None


def _read(path: Path, file: IO[bytes], dimensions: int | None) -> NDArray[Any]:
    head = file.read(4)
    known = len(head) == 4 and head[:2] == b"\0\0" and head[2] in _TYPES and 1 <= head[3] <= 8
    require(known, f"{path} is not an IDX file: it begins with {head.hex(' ') or 'nothing'}.")
    dtype, rank = np.dtype(_TYPES[head[2]]), head[3]
    require(
        dimensions in (None, rank),
        f"{path} holds an array of {rank} dimension(s); one of {dimensions} is expected here.",
    )
    lengths = file.read(4 * rank)
    require(len(lengths) == 4 * rank, f"{path} is cut off inside its header.")
    shape = struct.unpack(f">{rank}I", lengths)
    claimed = math.prod(shape) * dtype.itemsize
    stated = f"its header says {' × '.join(map(str, shape))} values, {claimed} bytes"
    require(claimed > 0, f"{path} holds no data: {stated}.")
    require(claimed <= _LARGEST, f"{path} is not plausible: {stated}, and at most {_LARGEST} are accepted.")
    # Memory grows with what the file really holds, never with what it claims.
    body = bytearray()
    while len(body) <= claimed:
        chunk = file.read(min(_CHUNK, claimed + 1 - len(body)))
        if not chunk:
            break
        body += chunk
    require(len(body) >= claimed, f"{path} is cut off: {stated}, and {len(body)} follow.")
    require(len(body) == claimed, f"{path} is too long: {stated}, and more follow.")
    array = np.frombuffer(body, dtype=dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)
