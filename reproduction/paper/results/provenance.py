"""Where a result comes from: the commit, the versions and the device of the run that made it."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dpfedexp

SOURCE = ("src", "reproduction/*.py", "reproduction/*.toml", "pyproject.toml")
"""What a result depends on in the repository; results and documents may change without making it another."""


@cache
def commit() -> tuple[str | None, bool | None]:
    """The commit of the source that runs, and whether the source differs from it; (None, None) outside a repository."""
    root = Path(dpfedexp.__file__).resolve().parents[2]
    # An installed wheel may lie inside somebody else's repository, whose commit says nothing about it.
    if not (root / ".git").exists() or not (root / "src" / "dpfedexp").is_dir():
        return None, None
    head, changes = _git(root, "rev-parse", "HEAD"), _git(root, "status", "--porcelain", "--", *SOURCE)
    return (None, None) if head is None or changes is None else (head, bool(changes))


def _git(root: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    return {
        "dpfedexp": dpfedexp.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": version("scipy"),
        "python": platform.python_version(),
    }


def device(asked: str | None) -> str:
    """What the run is made on, in words: the processor's architecture or the accelerator's name."""
    name = asked or ("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and torch.cuda.is_available():
        return f"{name} ({torch.cuda.get_device_name(name)})"
    return f"{name} ({platform.machine()})" if name == "cpu" else name


def here(asked_device: str | None) -> dict[str, Any]:
    """The provenance of a run that is made here and now."""
    head, dirty = commit()
    return {"commit": head, "dirty": dirty, "versions": versions(), "device": device(asked_device), "recorded_in": None}
