"""Data sets by name: MNIST (or another set in its four IDX files), CIFAR-10, and the paper's synthetic problem.

Files are found on disk, or downloaded and verified.

A new data set is a function that loads it and an entry in `DATA_SETS`.
"""

import gzip
import hashlib
import http.client
import math
import os
import struct
import sys
import urllib.request
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.data.arrays import check_count
from dpfedexp.data.federation import Federation
from dpfedexp.data.partition import generator
from dpfedexp.errors import InputError, check_known, checked, require
from dpfedexp.files import create_file

GZIP_MAGIC = b"\x1f\x8b"
_CHUNK = 1 << 20
_LARGEST = 1 << 32
"""The largest IDX file in bytes: above every known file, and small enough that a forged one can't exhaust the memory."""
_LARGEST_DOWNLOAD = 1 << 28
"""The largest download in bytes, packed or unpacked; a larger answer can't be the requested file."""

MNIST_FILES = {
    "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
}
"""The four standard file names, and the md5 of MNIST's own decompressed files."""
MIRRORS = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")

CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
CIFAR10_FOLDERS = ("", "cifar-10-batches-bin", "cifar10", "cifar10/cifar-10-batches-bin")
CIFAR10_SOURCE = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
RECORD = 1 + 3 * 32 * 32
"""The bytes of one CIFAR-10 image: its label, then 32×32 values of each of red, green and blue."""


@checked
@dataclass(frozen=True)
class Standardize:
    """x ↦ (x − mean)/std. Both numbers must be public: numbers from the clients' data would reveal something about them."""

    mean: float = 0.1307
    std: float = 0.3081

    def __call__(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.std


@dataclass(frozen=True)
class DataSet:
    """Examples that a partitioner distributes to clients, and `test`: (inputs, targets) of the server."""

    inputs: Any
    targets: Any
    test: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class DataSetEntry:
    """A data set by name, with its default network and the public mean and standard deviation of its inputs."""

    load: Callable[[str | None], DataSet]
    model: str | None = None
    standard: tuple[float, float] | None = None


@checked
def load_mnist(data: Path | str | None = None) -> DataSet:
    """Load MNIST from `data`, else DPFEDEXP_DATA, else the user cache, else download it there; `test` has the test images.

    A folder may hold the four files itself or in a folder `mnist` inside it, gzipped or plain. Images are bytes [n, 1, 28, 28].
    """
    folder = find_mnist(data)
    if folder is None:
        folder = cache_folder("mnist")
        otherwise = (
            f"Otherwise put {', '.join(MNIST_FILES)} (each plain or with .gz) into {folder}, "
            "or name the folder that holds them as data or in DPFEDEXP_DATA."
        )
        print(f"downloading MNIST into {folder}", file=sys.stderr)
        for name in _missing(folder):
            fetch(f"{name}.gz", MNIST_FILES[name], folder, otherwise)
    train_images, train_labels, test_images, test_labels = (
        torch.from_numpy(read_idx(path, dimensions=3 if "images" in path.name else 1))
        for path in (_mnist_file(folder, name) for name in MNIST_FILES)
        if path
    )
    for part, images, labels in (("train", train_images, train_labels), ("t10k", test_images, test_labels)):
        counts = f"{len(images)} {part} images and {len(labels)} {part} labels"
        require(len(images) == len(labels), f"{folder} has {counts}; the numbers must be equal.")
    one, two = (tuple(images.shape[1:]) for images in (train_images, test_images))
    require(one == two, f"{folder} has train images of shape {one} and t10k images of shape {two}; they must agree.")
    return DataSet(train_images[:, None], train_labels, (test_images[:, None], test_labels))


def find_mnist(data: Path | str | None = None) -> Path | None:
    """The folder with the four files; None if no folder was given and the user's cache does not have them."""
    named, source = (data, "data") if data is not None else (os.environ.get("DPFEDEXP_DATA"), "DPFEDEXP_DATA")
    if not named:
        folder = cache_folder("mnist")
        return None if _missing(folder) else folder
    base = Path(named).expanduser()
    best = min((base, base / "mnist"), key=lambda folder: len(_missing(folder)))
    lacks = _missing(best)
    found = f"{source} is {str(named)!r}, but the folder {best} lacks {', '.join(lacks)} (each plain or with .gz)"
    require(not lacks, f"{found}; put what is missing there, or name another folder.")
    return best


def _mnist_file(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def _missing(folder: Path) -> list[str]:
    return [name for name in MNIST_FILES if _mnist_file(folder, name) is None]


def cifar10(folder: str | None) -> DataSet:
    """Load CIFAR-10 as bytes [n, 3, 32, 32]; `test` has the test images.

    It is searched in `folder`, else DPFEDEXP_DATA, else `dpfedexp/cifar10` in the user's cache; the files may be in the folder
    itself, or in `cifar-10-batches-bin` or `cifar10` inside it.
    """
    named, cache = folder or os.environ.get("DPFEDEXP_DATA"), cache_folder("cifar10")
    places = [*([Path(named).expanduser() / inner for inner in CIFAR10_FOLDERS] if named else []), cache]
    place = next((place for place in places if all((place / name).is_file() for name in CIFAR10_FILES)), None)
    if place is None:
        raise InputError(
            f"CIFAR-10 was not found in {named or cache}: unpack {CIFAR10_SOURCE} there, or name the folder that holds "
            f"{CIFAR10_FILES[0]} to {CIFAR10_FILES[-2]} and {CIFAR10_FILES[-1]} as data or in DPFEDEXP_DATA."
        )
    *train, test = (_records(place / name) for name in CIFAR10_FILES)
    (x, y), held_out = ((records[:, 1:].view(-1, 3, 32, 32), records[:, 0]) for records in (torch.cat(train), test))
    return DataSet(x, y, held_out)


def _records(path: Path) -> Tensor:
    try:
        content = np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise InputError(f"{str(path)!r} can't be read: {error.strerror}.") from None
    size = len(content)
    require(size > 0 and size % RECORD == 0, f"{str(path)!r} has {size} bytes; an image of CIFAR-10 has {RECORD}.")
    records = torch.from_numpy(content).view(-1, RECORD)
    highest = int(records[:, 0].max())
    require(highest < 10, f"{str(path)!r} has the label {highest}; CIFAR-10 has labels 0 to 9.")
    return records


OTHER_KINDS = ("synthetic", "npz", "factory")
"""Kinds of data that are not data sets to split: they define their own clients."""
DATA_SETS: dict[str, DataSetEntry] = {
    "mnist": DataSetEntry(load_mnist, "mnist_cdp_net", (0.1307, 0.3081)),
    "cifar10": DataSetEntry(cifar10, "cifar_net", (0.4734, 0.2516)),
}


def check_kind(kind: str) -> None:
    check_known("data.kind", kind, (*OTHER_KINDS, *DATA_SETS))


def cache_folder(name: str) -> Path:
    """The folder in which a data set is kept: `dpfedexp/<name>` in XDG_CACHE_HOME or ~/.cache."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpfedexp" / name


def fetch(name: str, md5: str, folder: Path, otherwise: str) -> None:
    """Download a file of MNIST into a folder, from the first mirror whose unpacked file has the md5."""
    refusals = []
    for mirror in MIRRORS:
        try:
            content = _receive(mirror + name, md5)
        except (http.client.HTTPException, OSError, ValueError, zlib.error) as error:
            refusals.append(f"{mirror} failed ({str(error) or type(error).__name__})")
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):  # another process was faster, and its file was verified too
                create_file(folder / name, content)
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"{folder} cannot be written: {why}; free space there, or set XDG_CACHE_HOME.") from None
        return
    raise InputError(f"{name} could not be downloaded: {'; '.join(refusals)}. {otherwise}")


def _receive(url: str, md5: str) -> bytes:
    """Return the file that a mirror sends; raises `ValueError` if its md5 is wrong, as of another or an incomplete file."""
    request = urllib.request.Request(url, headers={"User-Agent": "dpfedexp"})
    with urllib.request.urlopen(request, timeout=30.0) as answer:
        content: bytes = answer.read(_LARGEST_DOWNLOAD)
    unpacked = zlib.decompressobj(wbits=31).decompress(content, _LARGEST_DOWNLOAD)
    found = hashlib.md5(unpacked, usedforsecurity=False).hexdigest()
    if found != md5:
        raise ValueError(f"it sent another file than the one asked for: md5 {found}, expected {md5}")
    return content


@checked
def read_idx(path: Path | str, dimensions: int | None = None) -> NDArray[np.uint8]:
    """Read the bytes of an IDX file, gzipped or plain (detected from its content), without trusting its header.

    Args:
        path: the file.
        dimensions: the number of dimensions that the array must have; None for any.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            magic = file.read(2)
            file.seek(0)
            if magic != GZIP_MAGIC:
                return _array(path, file, dimensions)
            with gzip.open(file) as unpacked:
                return _array(path, unpacked, dimensions)  # type: ignore[arg-type]
    except FileNotFoundError:
        raise InputError(f"{path} does not exist.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is a damaged gzip file ({error}); replace it with a whole copy.") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None


def _array(path: Path, file: IO[bytes], dimensions: int | None) -> NDArray[np.uint8]:
    head = file.read(4)
    rank = head[3] if head[:3] == b"\0\0\x08" and len(head) == 4 else 0
    lengths = file.read(4 * rank)
    known = 1 <= rank <= 8 and len(lengths) == 4 * rank
    require(known, f"{path} is not an IDX file of bytes: it begins with {(head + lengths).hex(' ') or 'nothing'}.")
    fits = dimensions in (None, rank)
    require(fits, f"{path} holds an array of {rank} dimension(s); one of {dimensions} is expected here.")
    shape = struct.unpack(f">{rank}I", lengths)
    claimed = math.prod(shape)
    stated = f"its header says {' × '.join(map(str, shape))} values, {claimed} bytes"
    require(0 < claimed <= _LARGEST, f"{path} is not plausible: {stated}; 1 to {_LARGEST} are accepted.")
    # Memory grows with the file's real content, not with the size that its header claims.
    body = bytearray()
    while chunk := file.read(min(_CHUNK, claimed + 1 - len(body))):
        body += chunk
    follow = "more" if len(body) > claimed else len(body)
    require(len(body) == claimed, f"{path} is damaged: {stated}, and {follow} follow.")
    return np.frombuffer(body, dtype=np.uint8).reshape(shape)


@checked
@dataclass(frozen=True)
class SyntheticProblem:
    """The paper's linear regression: clients, and their common optimum w*.

    It has one sample per client: w* ~ N(0, I); u_i ~ N(0, 0.1²); m_i ~ N(u_i·1, I); x_i ~ N(m_i, I); y_i = x_iᵀw*.
    So E‖x_i‖² = 2.01 d, and more than d clients determine w* exactly.
    """

    federation: Federation
    optimum: Tensor

    def distance(self, w: Tensor) -> float:
        """‖w − w*‖, the paper's error measure."""
        d = self.optimum.numel()
        require(w.numel() == d, f"w has {w.numel()} numbers; this problem has dimension {d}.")
        return float(torch.linalg.vector_norm(w.detach().cpu().double().flatten() - self.optimum.double()))


@checked
def synthetic_regression(clients: int = 1000, dimension: int = 500, seed: int = 0) -> SyntheticProblem:
    """Generate the problem of the paper's Fig. 1 (left): d = 500 for CDP, 100 for LDP."""
    check_count("clients", clients)
    check_count("dimension", dimension)
    rng = generator(seed)
    optimum = rng.standard_normal(dimension).astype(np.float32)
    means = rng.normal(scale=0.1, size=(clients, 1)) + rng.standard_normal((clients, dimension))
    inputs = (means + rng.standard_normal((clients, dimension))).astype(np.float32)
    # xᵀw* of the float32 x and w*, computed in double precision, so that w* solves the problem up to one rounding.
    targets = np.einsum("nd,d->n", inputs, optimum, dtype=np.float64)
    # One row per client: row i belongs to client i.
    federation = Federation.from_arrays(inputs, targets.astype(np.float32), np.arange(clients))
    return SyntheticProblem(federation, torch.from_numpy(optimum))
