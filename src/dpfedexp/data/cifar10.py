"""CIFAR-10 in its usual binary files: found, or unpacked from a JPEG archive into the user's cache."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dpfedexp.data.registry import DataSet
from dpfedexp.errors import InputError, require

TRAIN = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = "test_batch.bin"
FILES = (*TRAIN, TEST)
RECORD = 1 + 3 * 32 * 32
"""Bytes of an image: its label, then 32×32 of red, green and blue."""
PACKED = "packed.npz"
FOLDERS = ("", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin")
SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"


def cifar10(folder: str | None) -> DataSet:
    """CIFAR-10 as bytes [n, 3, 32, 32], the test images for the server.

    Looked for in `folder`, else DPFEDEXP_DATA, else the user's cache; the files may lie in the folder itself, or in
    `cifar-10-batches-bin` or `cifar10` inside it. Where a folder holds only `packed.npz`, the same images as JPEGs, they are
    unpacked once into the user's cache; the folder is never written to.
    """
    place = _find(folder)
    train, test = np.concatenate([_records(place / name) for name in TRAIN]), _records(place / TEST)

    def images(records: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(records[:, 1:])).view(-1, 3, 32, 32)

    def labels(records: NDArray[np.uint8]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(records[:, 0]))

    return DataSet(images(train), labels(train), (images(test), labels(test)))


def cache_folder() -> Path:
    """Where unpacked files are kept: `dpfedexp/cifar10` in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpfedexp" / "cifar10"


def _find(folder: str | None) -> Path:
    named = folder or os.environ.get("DPFEDEXP_DATA")
    bases = [Path(named).expanduser()] if named else []
    cache = cache_folder()
    for base in bases:
        for place in (base / inner for inner in FOLDERS):
            if all((place / name).is_file() for name in FILES):
                return place
    for base in bases:
        for packed in (base / inner / PACKED for inner in FOLDERS):
            if packed.is_file():
                return _unpacked(packed, cache)
    if all((cache / name).is_file() for name in FILES):
        return cache
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


def _unpacked(packed: Path, cache: Path) -> Path:
    """The binary files of a JPEG archive: the header that all images share, their bytes, sizes and labels."""
    source = packed.resolve()
    # The size tells archives apart, so that another one in the same place is not mistaken for it.
    place = cache / f"unpacked-{source.stat().st_size}"
    if all((place / name).is_file() for name in FILES):
        return place
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            f"{str(packed)!r} holds JPEGs, and Pillow is not installed; pip install pillow, or put the binary files there."
        ) from None
    try:
        place.mkdir(parents=True, exist_ok=True)
        with np.load(source, allow_pickle=False) as archive:
            for split, names in (("train", TRAIN), ("test", (TEST,))):
                header, data = archive["header"].tobytes(), archive[split].tobytes()
                ends = np.cumsum(archive[f"{split}_sizes"], dtype=np.int64)
                records = np.empty((len(ends), RECORD), np.uint8)
                records[:, 0] = archive[f"{split}_labels"]
                for row, begin, end in zip(records, (0, *ends[:-1]), ends, strict=True):
                    picture = np.asarray(Image.open(io.BytesIO(header + data[begin:end])).convert("RGB"))
                    row[1:] = picture.transpose(2, 0, 1).reshape(-1)
                for name, part in zip(names, np.array_split(records, len(names)), strict=True):
                    temporary = place / f"{name}.{os.getpid()}.part"
                    part.tofile(temporary)
                    temporary.replace(place / name)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{str(packed)!r} can't be unpacked into {str(place)!r}: {error}.") from None
    return place
