"""`dpfedexp flower new`: a small Flower app to start from."""

from __future__ import annotations

import re
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from dpfedexp.errors import InputError


def new_app(folder: Path | str) -> list[Path]:
    """Write the app into a folder that is new or empty; returns the files."""
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"the folder {str(folder)!r} is not empty; name a new one.")
        name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
        return _copy(files("dpfedexp.flower") / "template", folder, name)
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None


def _copy(source: Traversable, target: Path, name: str) -> list[Path]:
    written: list[Path] = []
    for entry in source.iterdir():
        if entry.name == "__pycache__":
            continue
        place = target / entry.name
        if entry.is_dir():
            place.mkdir(exist_ok=True)
            written += _copy(entry, place, name)
        else:
            place.write_text(entry.read_text(encoding="utf-8").replace("@name@", name), encoding="utf-8")
            written.append(place)
    return sorted(written)
