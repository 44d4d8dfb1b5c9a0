"""One row per client that stays from round to round, in memory while it fits and in a file that is mapped where it does not."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dpfedexp.errors import InputError

SHARE = 0.25
"""Of the memory that is free, at most this much goes into rows."""


def available_memory() -> int:
    """Bytes that the system could hand out now; without an answer, 4 GiB."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 4 * 2**30


def total_memory() -> int:
    """Bytes that the machine has, whoever uses them; without an answer, 4 GiB."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 4 * 2**30


def zero_rows(count: int, width: int, most: int | None = None) -> Tensor:
    """Zeros [count, width]. Above `most` bytes they are pages of a nameless file in the temporary folder, which TMPDIR moves."""
    size = 4 * count * width
    if size <= (SHARE * available_memory() if most is None else most):
        return torch.zeros(count, width)
    try:
        with tempfile.NamedTemporaryFile(prefix="dpfedexp-rows-") as file:
            # A file that was only lengthened takes no room until a row is written.
            file.truncate(size)
            return torch.from_file(file.name, shared=True, size=count * width).view(count, width)
    except (OSError, RuntimeError) as error:
        folder = tempfile.gettempdir()
        raise InputError(
            f"the clients' own state takes {size / 1e9:.1f} GB, which does not fit in memory, and {folder!r} can't hold it: "
            f"{error}. Set TMPDIR to a folder with that much room."
        ) from None


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether files that are written for triton can be imported; torch brings it along on CUDA."""
    return importlib.util.find_spec("triton") is not None
