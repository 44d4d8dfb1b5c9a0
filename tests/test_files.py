"""A file is the old one or the new one, never half of either, and a folder is left without temporary files."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

from dpfedexp import files


def test_a_file_is_on_disk_before_its_name_and_its_name_before_the_writer_returns(tmp_path, monkeypatch):
    calls = Mock()
    for name in ("chmod", "fsync", "replace"):
        getattr(calls, name).side_effect = getattr(os, name)
        monkeypatch.setattr(os, name, getattr(calls, name))
    files.replace_bytes(tmp_path / "file", b"new", mode=0o600)
    assert [name for name, *_ in calls.mock_calls] == ["chmod", "fsync", "replace", "fsync"]
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_an_error_leaves_the_old_file_and_no_temporary_one(moment, tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.replace_text(path, "old")

    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(*(Path, "write_bytes") if moment == "write" else (os, moment), full)
    with pytest.raises(OSError, match="No space left"):
        files.replace_text(path, "new")
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [left.name for left in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("mask", "rights"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o644)])
def test_rights_are_the_users_and_never_more(mask, rights, tmp_path):
    """safetensors makes its files anew, for their owner alone."""
    before = os.umask(mask)
    try:
        files.replace_text(tmp_path / "text", "x")
        files.replace_tensors(tmp_path / "tensors", {"w": torch.zeros(2)})
    finally:
        os.umask(before)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("text", "tensors")] == [rights, rights]


def test_tensors_that_can_not_be_written_are_an_error_of_the_file_system(tmp_path, monkeypatch):
    full = SafetensorError("Error while serializing: No space left on device")
    monkeypatch.setattr("safetensors.torch.save_file", Mock(side_effect=full))
    with pytest.raises(OSError, match=r"No space left on device$") as error:
        files.replace_tensors(tmp_path / "file", {"w": torch.ones(3)})
    assert error.value.strerror == "No space left on device"


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_never_replaces_one(links, tmp_path, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", Mock(side_effect=PermissionError("no hard links here")))
    files.create_file(tmp_path / "file", b"first")
    with pytest.raises(FileExistsError):
        files.create_file(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [left.name for left in tmp_path.iterdir()] == ["file"]
