"""`runs.jsonl`: one line for every run behind a section, with what made it. Tables and pages are built from these lines alone."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dpfedexp
from dpfedexp.data import load_mnist
from dpfedexp.errors import InputError
from dpfedexp.files import replace_text
from reproduction.paper.results.full_settings import flat
from reproduction.paper.results.planned import PlannedRun, Result

RESULTS_VERSION = 1
"""Raised when the same settings would give another result than before, because a formula was corrected."""

FILE = "runs.jsonl"


@dataclass(frozen=True)
class Record:
    """A finished run.

    Attributes:
        section: whose table or figure it stands behind.
        name: what the section calls it.
        settings: the whole configuration, every default spelled out; a record is found by it.
        seed: of the run; null where the line holds the seeds 0, 1, 2 …, as many as its settings say.
        images: a fingerprint of the images; null where there are none.
        results_version: see `RESULTS_VERSION`.
        finals: name → number; metrics are averages over the last 5 rounds, null where the run diverged.
        curves: name → numbers, those that the section shows.
        promise: ε per round and in total, δ, the number of parameters and the privacy statement.
        commit, dirty, versions, device, seconds: what made it, and its wall-clock time; null where it was never recorded.
        recorded_in: for a result from before these lines: the commit and the file that it was first kept in.
    """

    section: str
    name: str
    settings: dict[str, Any]
    seed: int | None
    images: str | None
    results_version: int
    finals: dict[str, float | None]
    curves: dict[str, list[Any]]
    promise: dict[str, Any]
    commit: str | None
    dirty: bool | None
    versions: dict[str, str] | None
    device: str | None
    seconds: float | None
    recorded_in: dict[str, str] | None

    def to_line(self) -> str:
        tree = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(tree, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    @staticmethod
    def from_line(line: str) -> Record:
        return Record(**json.loads(line))

    @property
    def key(self) -> str:
        """What two records of the same run share."""
        return key(self.settings, self.images, self.results_version)

    @property
    def result(self) -> Result:
        return {"finals": self.finals, "curves": self.curves, "seconds": self.seconds, **self.promise}

    def serves(self, run: PlannedRun) -> bool:
        """Whether it kept the curves that the section shows."""
        return set(run.curves) <= self.curves.keys()

    def kept_for(self, section: str, run: PlannedRun) -> Record:
        """The same run under the name of a section, with the curves that it shows and no others."""
        promise = self.promise if run.curves else {**self.promise, "privacy": None}
        curves = {name: self.curves[name] for name in run.curves}
        return replace(self, section=section, name=run.name, curves=curves, promise=promise)


def key(settings: dict[str, Any], images: str | None, version: int = RESULTS_VERSION) -> str:
    """The full settings as one text, the same whatever the order of the fields."""
    depends = {"settings": flat(settings), "images": images, "results_version": version}
    return json.dumps(depends, sort_keys=True, separators=(",", ":"))


def read(path: Path) -> list[Record]:
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error.strerror}.") from None
    records = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            records.append(Record.from_line(line))
        except (ValueError, TypeError):
            raise InputError(
                f"line {number} of {str(path)!r} is not the record of a run; take the line out and its run is made again."
            ) from None
    return records


def write(path: Path, records: Iterable[Record]) -> None:
    """Replaces the file; killed at any instant, the old one or the new one is there, complete."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, "".join(record.to_line() + "\n" for record in records))
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be written: {error.strerror}.") from None


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


MNIST = "06b0d1f124c4e5fa796686ade41a9b77"
"""The fingerprint of MNIST itself, whose numbers the paper prints."""


@cache
def fingerprint(folder: str | None) -> str:
    """A hash of the images and labels that `folder`, or the usual places, hold."""
    mnist = load_mnist(folder)
    digest = hashlib.sha256()
    for part in (mnist.inputs, mnist.targets, *(mnist.test or ())):
        digest.update(part.contiguous().numpy().tobytes())
    return digest.hexdigest()[:32]
