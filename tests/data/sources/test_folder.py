from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from dpfedexp.data import Federation
from dpfedexp.errors import InputError

X, Y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 1, 0])


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.csv").write_text(text)
    return folder


def test_npz_files_are_clients_by_name(tmp_path) -> None:
    np.savez(tmp_path / "zoe.npz", inputs=X[:3], targets=Y[:3])
    np.savez(tmp_path / "al.npz", inputs=X[3:], targets=Y[3:])
    np.savez(tmp_path / "bo.npz", inputs=X[:0], targets=Y[:0])
    made = Federation.from_folder(tmp_path)
    assert made.names == ("al", "bo", "zoe")
    assert made.sizes.tolist() == [1, 0, 3]
    assert np.array_equal(made.client(2)[0], X[:3])


def test_safetensors_files_hold_tensors_by_name(tmp_path) -> None:
    for name, part in (("a", slice(0, 1)), ("b", slice(1, None))):
        tensors = {"inputs": torch.from_numpy(X[part].copy()), "targets": torch.from_numpy(Y[part].copy())}
        save_file(tensors, tmp_path / f"{name}.safetensors")
    made = Federation.from_folder(str(tmp_path))
    assert made.sizes.tolist() == [1, 3]
    assert np.array_equal(made.client(1)[0], X[1:])


def test_csv_files_are_tables_whose_column_types_all_clients_share(tmp_path) -> None:
    write(tmp_path, a="age,ok,y\n3,true,1\n4,false,2\n", b="age,ok,y\n5,True,2.5\n", c="age,ok,y\n")
    (tmp_path / ".DS_Store").write_text("")
    made = Federation.from_folder(tmp_path, target="y")
    assert made.sizes.tolist() == [2, 1, 0]
    assert made.client(0)[0].tolist() == [[3.0, 1.0], [4.0, 0.0]]
    assert made.targets.dtype == torch.float32


def test_text_in_a_csv_file_needs_its_public_list(tmp_path) -> None:
    write(tmp_path, a="colour,y\nred,1\n", b="colour,y\nblue,0\n")
    with pytest.raises(InputError, match="column 'colour' holds text; give its public list"):
        Federation.from_folder(tmp_path, target="y")
    made = Federation.from_folder(tmp_path, target="y", categories={"colour": ["blue", "red"]})
    assert made.client(0)[0].tolist() == [[0.0, 1.0]]


def test_only_files_of_the_pattern_are_read(tmp_path) -> None:
    write(tmp_path, a="x,y\n1,1\n")
    (tmp_path / "notes.txt").write_text("")
    assert Federation.from_folder(tmp_path, target="y", files="*.csv").names == ("a",)
    with pytest.raises(InputError, match=r"'notes.txt' in .* is no file of a client .* files='\*.csv'"):
        Federation.from_folder(tmp_path, target="y")


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({}, "where no file is called"),
        ({"a": "x,y\n1,1\n", "b": "x\n1\n"}, "client 'b' lacks the column 'y', which the others have"),
        (
            {"a": "x,y\n1,1\n", "b": "x,y\n1,1\n,0\n"},
            "column 'x' of client 'b' has no value in 1 of 2 rows, first in row 1",
        ),
        ({"a": "x,y\n1,1\n2\n"}, "'a.csv' has 1 values in row 1 and 2 columns; give one value per column"),
        ({"a": ""}, "'a.csv' is empty; its first line must name the columns"),
        ({"a": "y,y\n1,1\n"}, "'a.csv' names a column twice"),
        ({"a": "x,label\n1,1\n"}, "target names the column 'y', which is not there"),
        ({"a": "x,y\n1_0,1\n"}, "column 'x' holds text"),
        ({"a": "x,y\n"}, "hold no rows at all"),
    ],
)
def test_csv_files_that_do_not_fit_get_a_sentence(tmp_path, files, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Federation.from_folder(write(tmp_path, **files), target="y")


def test_folders_and_files_that_cannot_be_read_get_a_sentence(tmp_path) -> None:
    with pytest.raises(InputError, match="which is no folder; give the folder that holds one file per client"):
        Federation.from_folder(tmp_path / "nothing")
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    with pytest.raises(InputError, match=r"'a.safetensors' can't be read as .safetensors: "):
        Federation.from_folder(tmp_path)
    (tmp_path / "a.safetensors").unlink()
    (tmp_path / "a.npz").write_bytes(b"no archive")
    with pytest.raises(InputError, match=r"'a.npz' can't be read as .npz: .*; write it anew or move it away"):
        Federation.from_folder(tmp_path)
    np.savez(tmp_path / "a.npz", inputs=X, targets=Y)
    save_file({"inputs": torch.from_numpy(X), "targets": torch.from_numpy(Y)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match="the client 'a' has several files; give one per client"):
        Federation.from_folder(tmp_path)


class Intruder:
    def __reduce__(self):
        return (Path.touch, (Path("intruder"),))


def test_a_file_cannot_run_code(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "files").mkdir()
    torch.save({"inputs": Intruder()}, tmp_path / "files" / "a.pt")
    with pytest.raises(InputError, match=r"'a.pt' in .* is a pickle, .*; write it as .safetensors or .npz"):
        Federation.from_folder(tmp_path / "files")
    np.savez(tmp_path / "files" / "a.npz", inputs=np.array([Intruder()], dtype=object))
    (tmp_path / "files" / "a.pt").unlink()
    with pytest.raises(InputError, match=r"'a.npz' can't be read as .npz"):
        Federation.from_folder(tmp_path / "files")
    assert not (tmp_path / "intruder").exists()
