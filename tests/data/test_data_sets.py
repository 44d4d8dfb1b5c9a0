"""Data sets by name: files that are found, downloaded, damaged or forged."""

import errno
import gzip
import hashlib
import os
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.sizes import long

from dpfedexp.data import Standardize, data_sets, load_mnist, read_idx
from dpfedexp.data.data_sets import DATA_SETS, MNIST_FILES, cache_folder, fetch
from dpfedexp.errors import InputError

DATA = os.environ.get("DPFEDEXP_DATA")


def idx_bytes(array: np.ndarray) -> bytes:
    kind = 8 if array.dtype == np.uint8 else 13
    head = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return head + array.astype(array.dtype.newbyteorder(">")).tobytes()


RNG = np.random.default_rng(0)
SMALL = {
    "train-images-idx3-ubyte": RNG.integers(0, 256, (40, 5, 5), dtype=np.uint8),
    "train-labels-idx1-ubyte": RNG.integers(0, 4, 40, dtype=np.uint8),
    "t10k-images-idx3-ubyte": RNG.integers(0, 256, (8, 5, 5), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": RNG.integers(0, 4, 8, dtype=np.uint8),
}
SERVED = {name: gzip.compress(idx_bytes(array)) for name, array in SMALL.items()}


def mirror(folder: Path, **files: bytes) -> str:
    """The address of a mirror that has these files, given by their names without .gz."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.gz").write_bytes(content)
    return f"{folder.as_uri()}/"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The addresses of files that were asked for, in order."""
    addresses, receive = [], data_sets._receive
    monkeypatch.setattr(data_sets, "_receive", lambda url, md5: addresses.append(url) or receive(url, md5))
    return addresses


@pytest.fixture(autouse=True)
def nowhere(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No data, an empty cache and no public mirrors, except where a test uses the real files."""
    if "mnist_folder" in request.fixturenames:
        return
    monkeypatch.delenv("DPFEDEXP_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(data_sets, "MIRRORS", ("http://127.0.0.1:9/",))


@pytest.fixture
def small_is_genuine(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, array in SMALL.items():
        monkeypatch.setitem(data_sets.MNIST_FILES, name, hashlib.md5(idx_bytes(array)).hexdigest())


def put(folder: Path, packed: bool = True, **replaced: np.ndarray) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in SMALL.items():
        content = idx_bytes(replaced.get(name.replace("-", "_"), array))
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return folder


def assert_small(data: data_sets.DataSet) -> None:
    held = (data.inputs[:, 0], data.targets, data.test[0][:, 0], data.test[1])
    for found, expected in zip(held, SMALL.values(), strict=True):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize(("packed", "inside"), [(True, "."), (False, "mnist")])
def test_the_files_are_found_in_the_folder_or_in_mnist_inside_it(tmp_path: Path, packed: bool, inside: str) -> None:
    put(tmp_path / "fashion" / inside, packed)
    assert_small(load_mnist(tmp_path / "fashion"))


def test_the_argument_goes_before_the_variable_and_that_before_the_cache(tmp_path, monkeypatch) -> None:
    for number, folder in enumerate((cache_folder("mnist"), tmp_path / "variable", tmp_path / "argument")):
        put(folder, train_labels_idx1_ubyte=np.full(40, number, np.uint8))
        if number == 1:
            monkeypatch.setenv("DPFEDEXP_DATA", str(folder))
        assert load_mnist(folder if number == 2 else None).targets.unique().tolist() == [number]


def test_a_named_folder_without_the_files_says_which_are_missing(tmp_path, monkeypatch) -> None:
    put(cache_folder("mnist"))
    folder = put(tmp_path / "half")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(InputError, match=r"data is .*half lacks t10k-labels-idx1-ubyte \(each plain or with .gz\)"):
        load_mnist(folder)
    monkeypatch.setenv("DPFEDEXP_DATA", str(tmp_path / "absent"))
    with pytest.raises(InputError, match=r"DPFEDEXP_DATA is .*absent lacks train-images-idx3-ubyte, train-labels"):
        load_mnist()


def test_without_data_one_sentence_says_why_and_which_files_go_where() -> None:
    with pytest.raises(InputError, match=r"could not be downloaded.*refused.* Otherwise put") as caught:
        load_mnist()
    for part in (*MNIST_FILES, str(cache_folder("mnist")), "DPFEDEXP_DATA"):
        assert part in str(caught.value)


@pytest.mark.usefixtures("small_is_genuine")
def test_what_is_missing_is_downloaded_once_into_the_cache(tmp_path, monkeypatch, asked) -> None:
    monkeypatch.setattr(data_sets, "MIRRORS", ("http://127.0.0.1:9/", mirror(tmp_path / "good", **SERVED)))
    for _ in range(2):
        assert_small(load_mnist())
        assert len(asked) == 8, "each file of both mirrors"
    assert {path.stem for path in cache_folder("mnist").iterdir()} == {*SERVED}


@pytest.mark.usefixtures("small_is_genuine")
def test_an_interrupted_download_goes_on_with_the_files_that_are_missing(tmp_path, monkeypatch, asked) -> None:
    cut = {name: content[:20] if "labels" in name else content for name, content in SERVED.items()}
    monkeypatch.setattr(data_sets, "MIRRORS", (mirror(tmp_path / "mirror", **cut),))
    with pytest.raises(InputError, match=r"train-labels-idx1-ubyte.gz could not be downloaded.*another file"):
        load_mnist()
    assert [path.name for path in cache_folder("mnist").iterdir()] == ["train-images-idx3-ubyte.gz"]
    mirror(tmp_path / "mirror", **SERVED)
    asked.clear()
    assert_small(load_mnist())
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"train_labels_idx1_ubyte": np.zeros(39, np.uint8)}, "40 train images and 39 train labels"),
        ({"t10k_images_idx3_ubyte": np.zeros((8, 4, 5), np.uint8)}, r"shape \(5, 5\) and t10k .* shape \(4, 5\)"),
        ({"t10k_labels_idx1_ubyte": np.zeros((8, 1), np.uint8)}, "t10k-labels.*2 dimension"),
        ({"train_images_idx3_ubyte": np.zeros((40, 5, 5), np.float32)}, "is not an IDX file of bytes"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(tmp_path: Path, replaced: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        load_mnist(put(tmp_path / "odd", **replaced))


def test_real_mnist_is_what_it_should_be(mnist_folder: Path) -> None:
    data = load_mnist(mnist_folder)
    assert data.inputs.shape == (60_000, 1, 28, 28)
    assert data.test[0].shape == (10_000, 1, 28, 28)
    assert data.inputs.dtype == data.targets.dtype == torch.uint8
    arrays = (data.inputs[:, 0], data.targets, data.test[0][:, 0], data.test[1])
    for array, (name, md5) in zip(arrays, MNIST_FILES.items(), strict=True):
        assert hashlib.md5(idx_bytes(array.numpy())).hexdigest() == md5, name
    # The constants of Standardize are the training images' own.
    counts, levels = data.inputs.flatten().bincount(minlength=256).numpy(), np.arange(256) / 255
    mean = np.average(levels, weights=counts)
    assert mean == pytest.approx(Standardize().mean, abs=1e-4)
    assert np.sqrt(np.average((levels - mean) ** 2, weights=counts)) == pytest.approx(Standardize().std, abs=1e-4)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "some-idx3-ubyte"
    path.write_bytes(content)
    return path


ARRAY = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def huge(rank: int = 3, length: int = 2**31 - 1) -> bytes:
    return bytes([0, 0, 8, rank]) + struct.pack(f">{rank}I", *[length] * rank)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"\0\0\x08", "is not an IDX file of bytes: it begins with 00 00 08"),
        (bytes([0, 0, 8, 0]), "is not an IDX file"),
        (bytes([0, 0, 7, 1, 0, 0, 0, 1, 1]), "is not an IDX file"),
        (bytes([0, 0, 8, 3, 0, 0]), "is not an IDX file of bytes: it begins with 00 00 08 03 00 00"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 0]), "is not plausible: its header says 0 values"),
        (idx_bytes(ARRAY)[:-1], "is damaged: its header says 2 × 3 × 4 values, 24 bytes, and 23 follow"),
        (idx_bytes(ARRAY) + b"x", "is damaged: its header says 2 × 3 × 4 values, 24 bytes, and more follow"),
        (huge(), "is not plausible"),
        (huge(1, 2**32 - 1), "is damaged: its header says 4294967295 values"),
    ],
)
def test_a_forged_or_damaged_file_is_named_in_one_sentence(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = written(tmp_path, content)
    with pytest.raises(InputError, match=sentence) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [(huge(1, 2**32 - 1) + bytes(1000), "1000 follow"), (idx_bytes(ARRAY) + bytes(1 << 26), "is damaged")],
)
def test_memory_follows_the_file_and_not_its_claim(tmp_path: Path, content: bytes, sentence: str) -> None:
    path = written(tmp_path, gzip.compress(content))
    tracemalloc.start()
    with pytest.raises(InputError, match=sentence):
        read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One chunk of 2^20 bytes and the decompressor's buffers; the claim is 2^32, and a bomb unpacks to 2^26.
    assert peak < 8 << 20


def test_a_missing_file_a_folder_and_labels_in_place_of_images_are_named(tmp_path: Path) -> None:
    labels, cut = written(tmp_path, idx_bytes(np.zeros(5, dtype=np.uint8))), tmp_path / "cut"
    cut.write_bytes(gzip.compress(idx_bytes(ARRAY))[:-9])
    for path, sentence in (
        (tmp_path / "absent", "absent does not exist"),
        (tmp_path, "cannot be read: Is a directory"),
        (labels, r"holds an array of 1 dimension\(s\); one of 3 is expected"),
        (cut, "is a damaged gzip file"),
    ):
        with pytest.raises(InputError, match=sentence):
            read_idx(path, dimensions=3)


CONTENT = bytes(range(256)) * 2000
PACKED, MD5 = gzip.compress(CONTENT), hashlib.md5(CONTENT).hexdigest()
FAULTS = {
    "cut": ({"a": PACKED[: len(PACKED) // 2]}, "another file than the one asked for"),
    "bomb": ({"a": gzip.compress(bytes(1 << 24))}, "another file than the one asked for"),
    "too long": ({"a": bytes(1 << 24)}, "incorrect header"),
    "unavailable": ({}, "No such file"),
}


@pytest.mark.parametrize(("files", "sentence"), FAULTS.values(), ids=FAULTS)
def test_a_bad_mirror_is_named_leaves_nothing_and_the_next_one_is_asked(tmp_path, monkeypatch, files, sentence) -> None:
    monkeypatch.setattr(data_sets, "_LARGEST_DOWNLOAD", 1_000_000)
    bad, good, folder = mirror(tmp_path / "bad", **files), mirror(tmp_path / "good", a=PACKED), tmp_path / "made"
    monkeypatch.setattr(data_sets, "MIRRORS", (bad,))
    with pytest.raises(InputError, match=sentence) as caught:
        fetch("a.gz", MD5, folder, "")
    assert str(caught.value).startswith(f"a.gz could not be downloaded: {bad}")
    assert not folder.exists()
    monkeypatch.setattr(data_sets, "MIRRORS", (bad, good))
    fetch("a.gz", MD5, folder, "")
    assert [path.read_bytes() for path in folder.iterdir()] == [PACKED]


def test_a_disk_that_fills_up_ends_the_search_with_a_sentence(tmp_path, monkeypatch, asked) -> None:
    monkeypatch.setattr(
        data_sets, "MIRRORS", (mirror(tmp_path / "first", a=PACKED), mirror(tmp_path / "second", a=PACKED))
    )
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr("dpfedexp.files.Path.write_bytes", full)
    with pytest.raises(InputError, match="cannot be written: No space left on device; free space"):
        fetch("a.gz", MD5, tmp_path / "made", "")
    assert len(asked) == 1
    assert list((tmp_path / "made").iterdir()) == []


def write_batches(folder, images=4):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in data_sets.CIFAR10_FILES:
        records = rng.integers(0, 256, size=(images, data_sets.RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)


@pytest.mark.parametrize("inner", data_sets.CIFAR10_FOLDERS)
def test_files_are_found_in_the_folder_and_where_archives_put_them(tmp_path, inner):
    write_batches(tmp_path / "data" / inner)
    found = DATA_SETS["cifar10"].load(str(tmp_path / "data"))
    assert found.inputs.shape == (20, 3, 32, 32)
    assert found.test[0].shape == (4, 3, 32, 32)
    raw = np.fromfile(tmp_path / "data" / inner / "data_batch_2.bin", dtype=np.uint8).reshape(-1, data_sets.RECORD)
    assert np.array_equal(found.inputs[4].numpy().ravel(), raw[0, 1:])
    assert int(found.targets[4]) == raw[0, 0]


def test_missing_and_damaged_files_are_one_sentence(tmp_path):
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz.*DPFEDEXP_DATA"):
        data_sets.cifar10(str(tmp_path))
    write_batches(tmp_path / "data")
    path = tmp_path / "data" / "data_batch_3.bin"
    content = path.read_bytes()
    for changed, message in ((content[:-1], "an image of CIFAR-10 has 3073"), (b"\x0a" + content[1:], "labels 0 to 9")):
        path.write_bytes(changed)
        with pytest.raises(InputError, match=message):
            data_sets.cifar10(str(tmp_path / "data"))


@long
def test_real_cifar10_is_what_it_should_be(tmp_path):
    """From the script `cifar10/unpack.py` of $DPFEDEXP_DATA, which writes the binary files."""
    pytest.importorskip("PIL.Image")
    script = Path(DATA or "absent") / "cifar10" / "unpack.py"
    if not script.is_file():
        pytest.skip("real CIFAR-10 is not here; set DPFEDEXP_DATA to a folder with cifar10/unpack.py and its images")
    subprocess.run([sys.executable, str(script), str(tmp_path / "cifar10")], check=True)
    found = data_sets.cifar10(str(tmp_path))
    assert found.inputs.shape == (50_000, 3, 32, 32)
    assert found.test[0].shape == (10_000, 3, 32, 32)
    assert found.targets.bincount().tolist() == [5000] * 10
    assert found.test[1].bincount().tolist() == [1000] * 10
