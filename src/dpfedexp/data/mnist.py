"""MNIST, or any data set in the same four files (Fashion-MNIST, KMNIST): found, or downloaded and verified."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dpfedexp.data.arrays import Transform
from dpfedexp.data.download import NotDownloaded, cache_folder, fetch
from dpfedexp.data.federation import Federation
from dpfedexp.data.idx import read_idx
from dpfedexp.data.registry import DataSet
from dpfedexp.errors import InputError, checked, require

FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
"""The four standard names, and the md5 of MNIST's own decompressed bytes."""

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)


@checked
@dataclass(frozen=True)
class ImageData:
    """Images as bytes [n, rows, columns] and their labels as bytes [n]."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    name: str


@checked
@dataclass(frozen=True)
class Standardise:
    """x ↦ (x − mean)/std. The two numbers must be public: computed from the clients' data they would leak from them."""

    mean: float = 0.1307
    std: float = 0.3081

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


@checked
def load_mnist(
    data: Path | str | None = None, *, download: bool = True, mirrors: Sequence[str] | None = None
) -> ImageData:
    """Images and labels from `data`, else DPFEDEXP_DATA, else the user cache, else downloaded into that cache.

    A folder may hold the four files itself or in a folder `mnist` inside it, each gzipped or plain. `mirrors` (or
    DPFEDEXP_MIRRORS, separated by spaces) replaces the public ones.
    """
    folder = find_mnist(data)
    if folder is None:
        folder = cache_folder("mnist")
        if not download:
            raise InputError(f"MNIST was not found; {_where_to_put(folder)}.")
        _download(folder, mirrors)
    paths = [_file(folder, name) for name in FILES]
    train_images, train_labels, test_images, test_labels = (
        torch.from_numpy(read_idx(path, dimensions=3 if "images" in path.name else 1)) for path in paths if path
    )
    for part, images, labels in (("train", train_images, train_labels), ("t10k", test_images, test_labels)):
        require(
            images.dtype == torch.uint8 and labels.dtype == torch.uint8,
            f"{folder} has {part} files of {images.dtype} and {labels.dtype}; images and labels must be bytes.",
        )
        require(
            len(images) == len(labels),
            f"{folder} has {len(images)} {part} images and {len(labels)} {part} labels; there must be as many.",
        )
    require(
        train_images.shape[1:] == test_images.shape[1:],
        f"{folder} has train images of shape {tuple(train_images.shape[1:])} and t10k images of shape "
        f"{tuple(test_images.shape[1:])}; they must be the same.",
    )
    return ImageData(train_images, train_labels, test_images, test_labels, folder.name)


@checked
def mnist_federation(
    images: ImageData,
    clients: int = 1000,
    alpha: float = 0.3,
    seed: int = 0,
    *,
    transform: Transform | None = None,
    **options: Any,
) -> Federation:
    """The paper's split: the training images, [1, 28, 28] each, over equal clients, class mix ~ Dirichlet(alpha)."""
    inputs = images.train_images.unsqueeze(1)
    return Federation.dirichlet(
        inputs, images.train_labels, clients=clients, alpha=alpha, seed=seed, transform=transform, **options
    )


def find_mnist(data: Path | str | None = None) -> Path | None:
    """The folder with the four files; None if nobody named one and the user cache has none."""
    named, source = (data, "data") if data is not None else (os.environ.get("DPFEDEXP_DATA"), "DPFEDEXP_DATA")
    if named:
        base = Path(named).expanduser()
        candidates = [base, base / "mnist"]
        for folder in candidates:
            if not _missing(folder):
                return folder
        best = min(candidates, key=lambda folder: len(_missing(folder)))
        raise InputError(
            f"{source} is {str(named)!r}, and {best} lacks {', '.join(_missing(best))} (each plain or with .gz); "
            f"put {'it' if len(_missing(best)) == 1 else 'them'} there or name another folder."
        )
    folder = cache_folder("mnist")
    return None if _missing(folder) else folder


def _file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _missing(folder: Path) -> list[str]:
    return [name for name in FILES if _file(folder, name) is None]


def _where_to_put(folder: Path) -> str:
    return (
        f"put {', '.join(FILES)} (each plain or with .gz) into {folder}, "
        "or name the folder that holds them as data or in DPFEDEXP_DATA"
    )


def _download(folder: Path, mirrors: Sequence[str] | None) -> None:
    chosen = list(mirrors if mirrors is not None else os.environ.get("DPFEDEXP_MIRRORS", "").split() or MIRRORS)
    print(f"downloading MNIST into {folder}", file=sys.stderr)
    for name in _missing(folder):
        try:
            fetch(f"{name}.gz", FILES[name], chosen, folder)
        except NotDownloaded as error:
            raise InputError(f"{str(error).rstrip('.')}. Otherwise {_where_to_put(folder)}.") from None


def mnist(folder: str | None) -> DataSet:
    """MNIST as images of one channel, the test images for the server."""
    images = load_mnist(folder)
    return DataSet(images.train_images[:, None], images.train_labels, (images.test_images[:, None], images.test_labels))
