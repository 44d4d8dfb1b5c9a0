"""CIFAR-10 in its usual binary files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpfedexp.data.download import cache_folder
from dpfedexp.data.registry import DataSet
from dpfedexp.errors import InputError, require

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
FILES = (*TRAIN, TEST)
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image: its label, then 32×32 of red, green and blue."""
FOLDERS = ("", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin")
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def cifar10(folder: str | None) -> DataSet:
    """CIFAR-10 as bytes [n, 3, 32, 32], the test images for the server.

    Looked for in `folder`, else DPFEDEXP_DATA, else `dpfedexp/cifar10` in the user's cache; the files may lie in the folder itself,
    or in `cifar-10-batches-bin` or `cifar10` inside it.
    """
    place = _find(folder)
    train, test = np.concatenate([_records(place / name) for name in TRAIN]), _records(place / TEST)

    def images(records: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, 3, 32, 32)

    def labels(records: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(records[:, 0]))

    return DataSet(images(train), labels(train), (images(test), labels(test)))


def _find(folder: str | None) -> Path:
    named = folder or os.environ.get("DPFEDEXP_DATA")
    cache = cache_folder("cifar10")
    places = [Path(named).expanduser() / inner for inner in FOLDERS] if named else []
    for place in (*places, cache):
        if all((place / name).is_file() for name in FILES):
            return place
    raise InputError(
        f"CIFAR-10 was not found in {named or cache}: unpack {SOURCE} there, or name the folder that holds {FILES[0]} to "
        f"{TRAIN[-1]} and {TEST} as data or in DPFEDEXP_DATA."
    )


def _records(path: Path) -> NDArray[np.uint8]:
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise InputError(f"{str(path)!r} can't be read: {error.strerror}.") from None
    require(
        len(content) > 0 and len(content) % RECORD == 0,
        f"{str(path)!r} has {len(content)} bytes; a file of CIFAR-10 holds images of {RECORD} bytes each.",
    )
    records = content.reshape(-1, RECORD)
    highest = int(records[:, 0].max())
    require(highest < 10, f"{str(path)!r} has the label {highest}; CIFAR-10 has labels 0 to 9.")
    return records
