"""CIFAR-10 from its binary files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dpfedexp.data import data_sets
from dpfedexp.data.data_sets import DATA_SETS
from dpfedexp.errors import InputError

DATA = os.environ.get("DPFEDEXP_DATA")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DPFEDEXP_DATA", raising=False)


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


def test_missing_files_are_one_sentence_that_says_where_to_get_them(tmp_path):
    with pytest.raises(InputError, match=r"cifar-10-binary\.tar\.gz.*DPFEDEXP_DATA"):
        data_sets.cifar10(str(tmp_path))


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
        data_sets.cifar10(str(tmp_path / "data"))


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
