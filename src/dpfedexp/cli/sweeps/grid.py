"""`--grid algorithm.clip=0.1,0.3,1`: from its text to the trials of a sweep."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from dpfedexp.config import Settings, load
from dpfedexp.errors import InputError, require

OPENING, CLOSING, QUOTES = "[{(", "]})", "\"'"
LONGEST = 120
"""Characters of a folder's name that people read."""


@dataclass(frozen=True)
class Trial:
    """One run of a sweep.

    Attributes:
        changes: what of the file is changed, each as `section.key=value`.
        seed: of the run.
    """

    changes: tuple[str, ...]
    seed: int

    @property
    def label(self) -> str:
        """The settings without the seed, by the last parts of their names; as they are in the file where nothing is varied."""
        short = [
            change.partition("=")[0].rpartition(".")[2] + "=" + change.partition("=")[2] for change in self.changes
        ]
        return ", ".join(short) or "as in the file"

    @property
    def folder(self) -> str:
        """A name that no other trial has: a readable part, and a hash of all of it for whatever a path or its length can't say."""
        text = "_".join([*self.changes, f"seed={self.seed}"])
        readable = "".join(c if c.isascii() and (c.isalnum() or c in "-_=.") else "-" for c in text)
        digest = hashlib.sha256(json.dumps([self.changes, self.seed]).encode()).hexdigest()
        return f"{readable[:LONGEST]}_{digest[:16]}"

    def settings(self, file: Path, overrides: Sequence[str]) -> Settings:
        """Of its run, checked."""
        settings = load(file, [*overrides, *self.changes, f"run.seed={self.seed}"])
        settings.check()
        return settings


def trials(grid: Sequence[str], seeds: int, first: int = 0) -> list[Trial]:
    """All combinations, each with so many seeds.

    Args:
        grid: texts such as `algorithm.clip=0.1,0.3,1`.
        seeds: how many.
        first: the first seed.
    """
    axes = [_axis(text) for text in grid]
    keys = [axis[0].partition("=")[0] for axis in axes]
    twice = {key for key in keys if keys.count(key) > 1}
    require(
        not twice, f"--grid has {', '.join(sorted(twice))} twice; give all of its values in one, separated by commas."
    )
    require("run.seed" not in keys, "--grid has run.seed; --seeds says how many seeds there are.")
    return [Trial(changes, first + seed) for changes in product(*axes) for seed in range(seeds)]


def check_one_promise(grid: Sequence[Trial], file: Path, overrides: Sequence[str]) -> list[Settings]:
    """The settings of all trials, checked. Refuses a grid whose runs promise different things, which no figure could cover."""
    settings = [trial.settings(file, overrides) for trial in grid]
    private = [one for one in settings if one.build_algorithm().private]
    promises = {
        "algorithm.adjacency": {repr(one.build_algorithm().adjacency) for one in private},
        "participation.noise_cohort": {repr(one.participation.noise_cohort) for one in private},
    }
    for name, values in promises.items():
        if len(values) > 1:
            raise InputError(
                f"--grid has {name} {' and '.join(sorted(values))}, which are promises about different changes of the data, so "
                "that no figure covers all runs; make a sweep of each."
            )
    return settings


def _axis(text: str) -> list[str]:
    key, equals, values = text.partition("=")
    found = list(dict.fromkeys(part.strip() for part in _split(values)))
    if not equals or not key.strip() or "" in found:
        raise InputError(f"--grid is {text!r}; it must look like algorithm.clip=0.1,0.3,1.")
    return [f"{key.strip()}={value}" for value in found]


def _split(text: str) -> list[str]:
    """At the commas that are in no bracket and no quotes."""
    parts, depth, quote = [""], 0, ""
    for c in text:
        if quote or c in QUOTES:
            quote = "" if c == quote else quote or c
        depth += (c in OPENING) - (c in CLOSING) if not quote else 0
        if c == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += c
    return parts
