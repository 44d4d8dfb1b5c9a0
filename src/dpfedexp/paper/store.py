"""Finished cells on disk, each run once and kept under a name made of its content.

A cell's result lies in `OUT/cells/<key>.json`, where the key is a hash of everything the result depends on. It is written as the
cell ends, by whoever ran it, so an interrupted command goes on where it stopped and two commands share what they have in common.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from dpfedexp.config import Settings
from dpfedexp.data import load_mnist
from dpfedexp.errors import InputError
from dpfedexp.paper.cells import Cell, Place, Result, TrainingCell
from dpfedexp.paper.pool import run_all

RESULTS_VERSION = 1
"""Raised when the same settings would give another result than before: a changed default, a corrected formula."""

MNIST = "06b0d1f124c4e5fa796686ade41a9b77"
"""The fingerprint of MNIST itself, whose numbers the paper prints."""


class Store:
    """Finished cells in a folder."""

    def __init__(self, folder: Path, place: Place = Place()) -> None:
        self.folder, self.place = folder, place
        self._images: str | None = None

    def path(self, cell: Cell) -> Path:
        depends = {"version": RESULTS_VERSION, **cell.identity}
        if cell.needs_images:
            depends["images"] = self.fingerprint()
        text = json.dumps(depends, sort_keys=True, separators=(",", ":"))
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self, cell: Cell) -> Result | None:
        """The result of a finished cell; None if it was not run, or if its file was damaged."""
        try:
            return json.loads(self.path(cell).read_text(encoding="utf-8"))["result"]
        except (OSError, ValueError, KeyError):
            return None

    def run(self, cells: Sequence[Cell], description: str) -> None:
        """Runs those cells that are not there yet; side by side, the long ones first."""
        unique = {self.path(cell): cell for cell in cells}
        missing = [(path, cell) for path, cell in unique.items() if self.load(cell) is None]
        if not missing:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"the folder {str(self.folder)!r} can't be written: {error.strerror}.") from None
        if self.place.workers == 1:
            # In one process, cells that share a problem follow each other and find its data on the device.
            missing.sort(key=lambda job: _problem_of(job[1]))
        else:
            missing.sort(key=lambda job: -job[1].cost)
        run_all(
            partial(_run_and_keep, place=self.place),
            missing,
            description,
            workers=self.place.workers,
            cost=lambda job: job[1].cost,
        )

    def fingerprint(self) -> str:
        """A hash of the images and labels, so that another data set in their place is another cell."""
        if self._images is None:
            images = load_mnist(self.place.data)
            parts = (images.train_images, images.train_labels, images.test_images, images.test_labels)
            digest = hashlib.sha256()
            for part in parts:
                digest.update(part.contiguous().numpy().tobytes())
            self._images = digest.hexdigest()[:32]
        return self._images


class Results:
    """Finished cells by their content: `results[cell]`."""

    def __init__(self, store: Store) -> None:
        self.store = store

    def __getitem__(self, cell: Cell) -> Result:
        found = self.store.load(cell)
        assert found is not None, "a part asked for a cell that it did not plan"
        return found

    def training(self, runs: Iterable[Settings]) -> list[Result]:
        return [self[TrainingCell(settings)] for settings in runs]

    @property
    def on_mnist(self) -> bool:
        """Whether the images are MNIST's, and not another set in their place."""
        return self.store.fingerprint() == MNIST


def _run_and_keep(job: tuple[Path, Cell], place: Place) -> None:
    path, cell = job
    result = cell.run(place)
    text = json.dumps({"version": RESULTS_VERSION, **cell.identity, "result": result}, allow_nan=False)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    try:
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise InputError(f"the file {str(path)!r} can't be written: {error.strerror}.") from None


def _problem_of(cell: Cell) -> str:
    if isinstance(cell, TrainingCell):
        return (
            cell.settings.data.model_dump_json() + cell.settings.model.model_dump_json() + str(cell.settings.run.seed)
        )
    return ""
