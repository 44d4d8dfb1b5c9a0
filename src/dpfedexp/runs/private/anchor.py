"""How far a ledger had come, as a small file: whoever keeps one elsewhere notices a ledger that was taken back."""

from __future__ import annotations

import json
from pathlib import Path

from dpfedexp.accounting.ledger import Mark
from dpfedexp.files import replace_text

LARGEST_TEXT = 4096


def write_mark(path: Path, mark: Mark, mode: int | None = None) -> None:
    """Returns when the mark is on disk. An `OSError` goes to whoever charges, so that nothing is released without it."""
    replace_text(path, json.dumps({"count": mark.count, "hash": mark.hash}) + "\n", mode)


def read_mark(path: Path) -> Mark | None:
    """The mark in a file, None where it is damaged. `FileNotFoundError` where there is none."""
    with open(path, "rb") as file:
        content = file.read(LARGEST_TEXT)
    try:
        values = json.loads(content)
        mark = Mark(values["count"], values["hash"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return mark if type(mark.count) is int and mark.count >= 0 and isinstance(mark.hash, str) else None
