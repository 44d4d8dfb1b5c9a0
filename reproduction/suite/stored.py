"""Natural problems as plain arrays in one small file each: written once from their sources, then read without them.

A file is what `data.kind = "npz"` of a configuration reads too: `inputs`, `targets`, `client` (who holds each row), `test_inputs`
and `test_targets`. Test rows belong to clients of their own, who hold no training row.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpfedexp.data.partition import generator
from dpfedexp.errors import InputError

Array = NDArray[Any]


@dataclass(frozen=True)
class Rows:
    """A source as one row per example.

    Attributes:
        inputs: [n, …], without the client, the target, or anything that follows from it.
        targets: [n].
        owner: [n], who a row belongs to, in any numbering.
        block: [n], what is held out together: owners, or groups of them that know each other's rows.
    """

    inputs: Array
    targets: Array
    owner: Array
    block: Array


def default_folder(folder: Path | str | None = None) -> Path:
    """`folder`, else $DPFEDEXP_SUITE, else `dpfedexp/suite` in XDG_CACHE_HOME or ~/.cache."""
    named = folder or os.environ.get("DPFEDEXP_SUITE")
    if named:
        return Path(named).expanduser()
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpfedexp" / "suite"


def split(rows: Rows, most_rows: int, most_test_rows: int = 5000) -> dict[str, Array]:
    """A fifth of the blocks for testing, the rest as clients 0, 1, 2, …, each with at most `most_rows` rows.

    All draws come from a fixed seed, so the same source gives the same file.
    """
    rng = generator(0)
    blocks = np.unique(rows.block)
    tested = np.isin(rows.block, rng.permutation(blocks)[: len(blocks) // 5])
    order = rng.permutation(len(rows.owner))
    order = order[np.argsort(rows.owner[order], kind="stable")]
    owners = rows.owner[order]
    starts = np.flatnonzero(np.r_[True, owners[1:] != owners[:-1]])
    place = np.arange(len(owners)) - np.repeat(starts, np.diff(np.r_[starts, len(owners)]))
    kept = order[place < most_rows]
    train, test = kept[~tested[kept]], kept[tested[kept]]
    test = rng.permutation(test)[:most_test_rows]
    return {
        "inputs": rows.inputs[train],
        "targets": rows.targets[train],
        "client": np.unique(rows.owner[train], return_inverse=True)[1].astype(np.int32),
        "test_inputs": rows.inputs[test],
        "test_targets": rows.targets[test],
    }


def write(path: Path, arrays: dict[str, Array]) -> None:
    """Whole or not at all: an interrupted command leaves no half of a file."""
    temporary = path.with_suffix(f".{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be written: {error.strerror}.") from None


def read(name: str, folder: Path | str | None) -> dict[str, Array]:
    path = default_folder(folder) / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as stored:
            return {part: stored[part] for part in stored.files}
    except FileNotFoundError:
        raise InputError(
            f"the problem {name!r} is not in {path.parent}; write it there with "
            "python -m reproduction suite --prepare, or name the folder that holds it in DPFEDEXP_SUITE."
        ) from None
    except (ValueError, OSError, EOFError) as error:
        raise InputError(
            f"{str(path)!r} is not a readable .npz file ({error}); delete it and run python -m reproduction suite --prepare."
        ) from None
