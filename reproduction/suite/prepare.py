"""`python -m reproduction suite --prepare`: the natural problems, from the packages that carry them to one small file each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from reproduction.suite import roles, stored, tables
from reproduction.suite.stored import Array

MAKERS: dict[str, Callable[[], dict[str, Array]]] = {
    name: getattr(tables, name) for name in ("movielens", "insteval", "randhie", "nlswork", "chem97")
}


def prepare(
    names: Iterable[str], folder: Path | str | None = None, shakespeare: Path | str | None = None
) -> list[Path]:
    """Writes the files that are not there yet.

    Args:
        names: prepared files by name, without `.npz`.
        folder: where they are kept; None for $DPFEDEXP_SUITE, or the user's cache.
        shakespeare: the source archive of the package shakespeare, or a folder with its texts; None where it is installed.

    Returns:
        What was written.
    """
    made = []
    makers = MAKERS | {"shakespeare": partial(roles.shakespeare, shakespeare)}
    for name in names:
        path = stored.default_folder(folder) / f"{name}.npz"
        if not path.exists():
            stored.write(path, makers[name]())
            made.append(path)
    return made
