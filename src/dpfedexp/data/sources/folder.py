"""A folder with one file per client: .npz, .safetensors or .csv; the file's name without its ending is the client's id."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file

from dpfedexp.errors import InputError, require

Table = dict[str, Any]


def client_files(path: str | Path, files: str) -> list[Path]:
    """The files of the clients in order of their names; hidden files are none."""
    folder = Path(path)
    require(
        folder.is_dir(), f"path is {str(path)!r}, which is no folder; give the folder that holds one file per client."
    )
    found = sorted(file for file in folder.glob(files) if not file.name.startswith("."))
    require(
        len(found) > 0, f"path is {str(path)!r}, where no file is called {files!r}; there must be one file per client."
    )
    for file in found:
        require(
            file.is_file() and file.suffix in _READERS,
            f"{file.name!r} in {str(path)!r} is a pickle, which may run code when it is read; write it as .safetensors or .npz."
            if file.suffix in (".pt", ".pth", ".pkl", ".pickle")
            else f"{file.name!r} in {str(path)!r} is no file of a client ({', '.join(_READERS)}); move it away, or say which are "
            "with files='*.csv'.",
        )
    stems = [file.stem for file in found]
    twice = next((stem for stem in stems if stems.count(stem) > 1), None) if len(set(stems)) < len(stems) else None
    require(
        twice is None, f"the client {twice!r} has several files; give one per client, or choose with files='*.csv'."
    )
    return found


def read_files(files: list[Path]) -> Iterator[Table]:
    """Tables with the same columns, for columns of text with one type for all the clients."""
    tables = [_read(file) for file in files]
    text = {name for table in tables for name, values in table.items() if isinstance(values, list)}
    kinds = {name: _kind([value for table in tables for value in table.get(name, ())]) for name in text}
    for table in tables:
        yield {name: kinds[name](values) if name in kinds else values for name, values in table.items()}


def _read(file: Path) -> Table:
    try:
        return _READERS[file.suffix](file)
    except (OSError, EOFError, ValueError, KeyError, SafetensorError, zipfile.BadZipFile) as error:
        if isinstance(error, InputError):
            raise
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise InputError(
            f"{file.name!r} can't be read as {file.suffix}: {first}; write it anew or move it away."
        ) from None


def _npz(file: Path) -> Table:
    with np.load(file, allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


def _safetensors(file: Path) -> Table:
    tensors: Table = load_file(file)
    return tensors


def _csv(file: Path) -> Table:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        reader = csv.reader(lines)
        header = next(reader, [])
        require(len(header) > 0, f"{file.name!r} is empty; its first line must name the columns.")
        require(len(set(header)) == len(header), f"{file.name!r} names a column twice; rename one of them.")
        rows = [row for row in reader if row]
    for number, row in enumerate(rows):
        require(
            len(row) == len(header),
            f"{file.name!r} has {len(row)} values in row {number} and {len(header)} columns; give one value per column.",
        )
    columns = zip(*rows, strict=True) if rows else [()] * len(header)
    return {name: [value.strip() for value in values] for name, values in zip(header, columns, strict=True)}


def _kind(values: list[str]) -> Callable[[list[str]], NDArray[Any]]:
    """How a column of text is read: as whole numbers, numbers or booleans if all of it can be, else as text with gaps as None."""
    full = [value for value in values if value]
    for convert in (_whole, _real, _truth):
        try:
            convert(full)
        except (ValueError, KeyError, OverflowError):
            continue
        return convert if len(full) == len(values) else _text
    return _text


def _whole(values: list[str]) -> NDArray[Any]:
    return np.array([int(_plain(value)) for value in values], dtype=np.int64)


def _real(values: list[str]) -> NDArray[Any]:
    return np.array([float(_plain(value)) for value in values], dtype=np.float64)


def _plain(value: str) -> str:
    """Python reads 1_2 as 12; in a file it is a name."""
    if "_" in value:
        raise ValueError(value)
    return value


def _truth(values: list[str]) -> NDArray[Any]:
    return np.array([{"true": True, "false": False}[value.lower()] for value in values], dtype=bool)


def _text(values: list[str]) -> NDArray[Any]:
    return np.array([value or None for value in values], dtype=object)


_READERS: dict[str, Callable[[Path], Table]] = {".npz": _npz, ".safetensors": _safetensors, ".csv": _csv}
