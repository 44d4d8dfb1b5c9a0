"""CIFAR-10 from its binary files, or from an archive of JPEGs."""

from __future__ import annotations

import io

import numpy as np
import pytest

from dpfedexp.data import cifar10
from dpfedexp.data.registry import DATA_SETS
from dpfedexp.errors import InputError


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DPFEDEXP_DATA", raising=False)


def write_batches(folder, images=4):
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in cifar10.FILES:
        records = rng.integers(0, 256, size=(images, cifar10.RECORD), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / name)


@pytest.mark.parametrize("inner", cifar10.FOLDERS)
def test_files_are_found_in_the_folder_and_where_archives_put_them(tmp_path, inner):
    write_batches(tmp_path / "data" / inner)
    found = DATA_SETS["cifar10"].load(str(tmp_path / "data"))
    assert found.inputs.shape == (20, 3, 32, 32)
    assert found.test[0].shape == (4, 3, 32, 32)
    raw = np.fromfile(tmp_path / "data" / inner / "data_batch_2.bin", dtype=np.uint8).reshape(-1, cifar10.RECORD)
    assert np.array_equal(found.inputs[4].numpy().ravel(), raw[0, 1:])
    assert int(found.targets[4]) == raw[0, 0]


def test_missing_files_are_one_sentence_that_says_where_to_get_them(tmp_path):
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz.*DPFEDEXP_DATA"):
        cifar10.cifar10(str(tmp_path))


@pytest.mark.parametrize(("change", "message"), [("cut", "3073 bytes each"), ("label", "labels 0 to 9")])
def test_damaged_files_are_refused(tmp_path, change, message):
    write_batches(tmp_path / "data")
    path = tmp_path / "data" / "data_batch_3.bin"
    content = bytearray(path.read_bytes())
    if change == "cut":
        content = content[:-1]
    else:
        content[0] = 10
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        cifar10.cifar10(str(tmp_path / "data"))


def test_an_archive_of_jpegs_is_unpacked_into_the_cache_and_its_folder_left_alone(tmp_path):
    image = pytest.importorskip("PIL.Image")
    folder = tmp_path / "data"
    folder.mkdir()
    parts = {"header": np.zeros(0, np.uint8)}
    for split, count in (("train", 10), ("test", 3)):
        files = []
        for number in range(count):
            buffer = io.BytesIO()
            image.new("RGB", (32, 32), (20 * number, 100, 200)).save(buffer, "JPEG", quality=95)
            files.append(buffer.getvalue())
        parts[split] = np.frombuffer(b"".join(files), np.uint8)
        parts[f"{split}_sizes"] = np.array([len(file) for file in files])
        parts[f"{split}_labels"] = np.arange(count, dtype=np.uint8) % 10
    np.savez(folder / "packed.npz", **parts)
    found = cifar10.cifar10(str(folder))
    assert found.targets.tolist() == list(range(10))
    assert found.test[1].tolist() == [0, 1, 2]
    # One colour per picture, so JPEG changes it by rounding only.
    assert abs(int(found.inputs[5, 0].float().mean()) - 100) <= 3
    assert [path.name for path in folder.iterdir()] == ["packed.npz"]
    (folder / "packed.npz").touch()
    assert cifar10.cifar10(str(folder)).inputs.equal(found.inputs)
