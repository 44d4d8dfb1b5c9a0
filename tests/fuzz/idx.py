"""IDX files, plain and gzipped: an array no larger than the file, or one sentence."""

from __future__ import annotations

import gzip
import struct
import tempfile
from pathlib import Path

from tests.fuzz.harness import fuzz, instrumented

with instrumented():
    from dpfedexp.data.data_sets import read_idx
    from dpfedexp.errors import InputError

PATH = Path(tempfile.mkdtemp()) / "file"
IMAGES = struct.pack(">BBBBIII", 0, 0, 8, 3, 2, 3, 4) + bytes(24)
LABELS = struct.pack(">BBBBI", 0, 0, 8, 1, 5) + bytes(5)
HUGE = struct.pack(">BBBBIII", 0, 0, 0x0E, 3, 2**20, 2**10, 2**10) + bytes(64)
SEEDS = [IMAGES, LABELS, HUGE, gzip.compress(IMAGES), gzip.compress(bytes(8000)), b""]


def one(data: bytes) -> None:
    PATH.write_bytes(data)
    for dimensions in (None, 1, 3):
        try:
            array = read_idx(PATH, dimensions)
        except InputError:
            continue
        assert dimensions in (None, array.ndim)
        assert array.nbytes <= 2000 * len(data)


if __name__ == "__main__":
    fuzz(one, SEEDS)
