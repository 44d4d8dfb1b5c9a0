from __future__ import annotations

import gzip
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from idx_files import CODES, idx_bytes

from dpfedexp.data import read_idx
from dpfedexp.errors import InputError


def written(folder: Path, content: bytes) -> Path:
    path = folder / "some-idx3-ubyte"
    path.write_bytes(content)
    return path


IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("dtype", list(CODES))
def test_what_was_written_is_read(tmp_path: Path, pack, dtype: str) -> None:
    array = IMAGES.astype(dtype) - np.asarray(3, dtype=dtype)
    read = read_idx(written(tmp_path, pack(idx_bytes(array))))
    assert np.array_equal(read, array)
    assert read.dtype == array.dtype
    assert read.dtype.isnative


def test_gzip_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    plain = tmp_path / "plain.gz"
    plain.write_bytes(idx_bytes(IMAGES))
    assert np.array_equal(read_idx(plain), IMAGES)


def test_the_array_may_be_written_to(tmp_path: Path) -> None:
    read = read_idx(written(tmp_path, idx_bytes(IMAGES)))
    read[0, 0, 0] = 9
    assert read[0, 0, 0] == 9


def huge(rank: int = 3, length: int = 2**31 - 1) -> bytes:
    return bytes([0, 0, 8, rank]) + struct.pack(f">{rank}I", *[length] * rank)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "is not an IDX file: it begins with nothing"),
        (b"\0\0\x08", "is not an IDX file: it begins with 00 00 08"),
        (b"<html>", "is not an IDX file: it begins with 3c 68 74 6d"),
        (b"\x80\x04\x95\x00", "is not an IDX file"),
        (bytes([0, 0, 8, 0]), "is not an IDX file"),
        (bytes([0, 0, 8, 255]), "is not an IDX file"),
        (bytes([0, 0, 7, 1, 0, 0, 0, 1, 1]), "is not an IDX file"),
        (bytes([0, 0, 8, 3, 0, 0]), "is cut off inside its header"),
        (bytes([0, 0, 8, 1, 0, 0, 0, 0]), "holds no data"),
        (idx_bytes(IMAGES)[:-1], "is cut off: its header says 2 × 3 × 4 values, 24 bytes, and 23 follow"),
        (idx_bytes(IMAGES) + b"x", "is too long: its header says 2 × 3 × 4 values, 24 bytes, and more follow"),
        (huge(), "is not plausible"),
        (huge(1, 2**32 - 1), "is cut off: its header says 4294967295 values"),
    ],
)
def test_a_forged_or_damaged_file_is_named_in_one_sentence(tmp_path: Path, pack, content: bytes, sentence: str) -> None:
    path = written(tmp_path, pack(content))
    with pytest.raises(InputError, match=sentence) as caught:
        read_idx(path)
    assert str(path) in str(caught.value)


def test_memory_follows_the_file_and_not_its_claim(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(huge(1, 2**32 - 1) + bytes(1000)))
    tracemalloc.start()
    with pytest.raises(InputError, match="1000 follow"):
        read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # One chunk of 2^20 bytes and the decompressor's buffers; the claim is 2^32.
    assert peak < 8 << 20


def test_a_gzip_bomb_is_unpacked_no_further_than_its_header_claims(tmp_path: Path) -> None:
    path = written(tmp_path, gzip.compress(idx_bytes(IMAGES) + bytes(1 << 26)))
    tracemalloc.start()
    with pytest.raises(InputError, match="is too long"):
        read_idx(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 << 20


@pytest.mark.parametrize("keep", [3, 12, 40, -1])
def test_a_cut_gzip_file_is_damaged(tmp_path: Path, keep: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (10, 10, 10), dtype=np.uint8)
    path = written(tmp_path, gzip.compress(idx_bytes(noise))[:keep])
    with pytest.raises(InputError, match="is a damaged gzip file"):
        read_idx(path)


def test_a_flipped_byte_in_a_gzip_file_is_noticed(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(idx_bytes(np.zeros((10, 10, 10), dtype=np.uint8))))
    content[-6] ^= 0xFF
    with pytest.raises(InputError, match="is a damaged gzip file"):
        read_idx(written(tmp_path, bytes(content)))


def test_labels_in_place_of_images_are_noticed(tmp_path: Path) -> None:
    path = written(tmp_path, idx_bytes(np.zeros(5, dtype=np.uint8)))
    with pytest.raises(InputError, match=r"holds an array of 1 dimension\(s\); one of 3 is expected"):
        read_idx(path, dimensions=3)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="absent does not exist"):
        read_idx(tmp_path / "absent")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_idx(tmp_path)
