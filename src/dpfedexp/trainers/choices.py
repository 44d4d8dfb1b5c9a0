"""Which trainer was quickest, kept for the same machine, network and shapes: `trainers.json` in the user's cache.

The file holds hashes, names of trainers and seconds, and nothing else. Whoever deletes it has everything measured anew.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from pathlib import Path

import torch

from dpfedexp import __version__
from dpfedexp.files import replace_text

_MOST = 2000
"""Choices that the file holds; the oldest make room."""


def cache_file() -> Path:
    """$DPFEDEXP_TRAINERS, or `dpfedexp/trainers.json` in XDG_CACHE_HOME or ~/.cache."""
    named = os.environ.get("DPFEDEXP_TRAINERS")
    if named:
        return Path(named)
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "dpfedexp" / "trainers.json"


def name_of(work: object, device: torch.device) -> str:
    """A hash of what was measured and of the machine that it was measured on."""
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    machine = (place, os.cpu_count(), torch.get_num_threads(), torch.__version__, __version__)
    return hashlib.sha256(repr((machine, work)).encode()).hexdigest()[:32]


def known(name: str) -> str | None:
    """The trainer that was chosen for this work before; None where none was, or the file can't be read."""
    found = _read().get(name)
    trainer = found.get("trainer") if isinstance(found, dict) else None
    return trainer if isinstance(trainer, str) else None


def keep(name: str, trainer: str, seconds: dict[str, float]) -> None:
    """Remember a choice and what it rests on; a cache that can't be written is no reason to stop."""
    path, held = cache_file(), _read()
    held[name] = {"trainer": trainer, "seconds": {key: value for key, value in seconds.items() if value < float("inf")}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(dict(list(held.items())[-_MOST:]), indent=0) + "\n")
    except OSError:
        return


def _read() -> dict[str, object]:
    try:
        held = json.loads(cache_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}
