"""Cells: the independent computations behind every table and figure, each run once and kept under a name made of its content.

A cell's result lies in `OUT/cells/<key>.json`, where the key is a hash of everything the result depends on. It is written as the
cell ends, by whoever ran it, so an interrupted command goes on where it stopped and two commands share what they have in common.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from dpfedexp import problem
from dpfedexp.config import Settings
from dpfedexp.data import load_mnist
from dpfedexp.errors import InputError
from dpfedexp.paper.pool import run_all
from dpfedexp.problem import Problem
from dpfedexp.simulation.evaluate import Evaluate
from dpfedexp.simulation.output import finite
from dpfedexp.simulation.train import train

RESULTS_VERSION = 1
"""Raised when the same settings would give another result than before: a changed default, a corrected formula."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where cells run: the device, the folder of the images, and how many processes side by side.

    By default one process to a core, and a single one on an accelerator, where the data then stay from cell to cell.
    """

    device: str | None = None
    data: str | None = None
    jobs: int | None = None

    @property
    def workers(self) -> int | None:
        return self.jobs or (1 if _is_accelerator(self.device) else None)


class Cell(Protocol):
    """One computation. It is a value: frozen, comparable, and cheap to send to another process."""

    @property
    def identity(self) -> dict[str, Any]:
        """Everything the result depends on, as JSON."""
        ...

    @property
    def needs_images(self) -> bool: ...

    @property
    def cost(self) -> float:
        """How long it takes beside the others, roughly."""
        ...

    def run(self, place: Place) -> Result: ...


@dataclass(frozen=True)
class TrainingCell:
    """A whole simulated run: `settings`, its seed included."""

    settings: Settings

    @property
    def identity(self) -> dict[str, Any]:
        # Without what has its default value, so that a setting that is new to the configuration leaves old results valid.
        elsewhere: Any = {"resolved": True, "data": {"path"}, "run": {"device", "chunk_size"}}
        return {"training": self.settings.model_dump(mode="json", exclude_defaults=True, exclude=elsewhere)}

    @property
    def needs_images(self) -> bool:
        return self.settings.data.kind == "mnist"

    @property
    def cost(self) -> float:
        small = self.settings.model.name == "mnist_ldp_net"
        return (
            self.settings.run.rounds
            * self.settings.data.clients
            * (30.0 if small else 100.0 if self.needs_images else 1.0)
        )

    def run(self, place: Place) -> Result:
        settings = self.settings
        posed = _posed(settings.data.model_dump_json(), settings.model.model_dump_json(), settings.run.seed, place.data)
        given = settings.run.model_dump() | {"device": place.device}
        began = time.perf_counter()
        done = train(
            posed.model,
            posed.federation,
            settings.build_algorithm(),
            local=settings.build_local(),
            participation=settings.build_participation(),
            test=posed.test,
            evaluate=posed.evaluate,
            progress=False,
            **given,
        )
        return {
            "history": [{key: finite(value) for key, value in record.items()} for record in done.history],
            "epsilon_round": finite(done.privacy.epsilon_round),
            "epsilon_total": finite(done.privacy.epsilon_total),
            "delta": done.privacy.delta,
            "parameters": sum(p.numel() for p in done.model.parameters()),
            "privacy": done.privacy.text,
            "seconds": time.perf_counter() - began,
        }


@lru_cache(maxsize=4)
def _posed(data: str, model: str, seed: int, folder: str | None) -> Problem:
    """The problem of the last few cells is kept, so that cells in a row that share it find it on their device."""
    settings = Settings.model_validate(
        {"data": json.loads(data), "model": json.loads(model), "run": {"seed": seed}},
    )
    posed = problem.build(settings, folder)
    if settings.data.kind != "synthetic" or posed.evaluate is None:
        return posed
    return Problem(posed.federation, posed.model, evaluate=_with_training_loss(posed, posed.evaluate))


def _with_training_loss(posed: Problem, evaluate: Evaluate) -> Evaluate:
    """Adds the mean of ½(xᵀw − y)² over the clients: what the paper tunes by, and not private."""

    def both(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        inputs, targets = posed.federation.prepare(posed.federation.inputs, posed.federation.targets, device)
        with torch.no_grad():
            loss = 0.5 * (model(inputs) - targets).double().square().mean()
        return {**evaluate(model), "nonprivate_training_loss": float(loss)}

    return both


class Store:
    """Finished cells in a folder."""

    def __init__(self, folder: Path, place: Place = Place()) -> None:
        self.folder, self.place = folder, place
        self._images: str | None = None

    def path(self, cell: Cell) -> Path:
        depends = {"version": RESULTS_VERSION, **cell.identity}
        if cell.needs_images:
            depends["images"] = self._fingerprint()
        text = json.dumps(depends, sort_keys=True, separators=(",", ":"))
        return self.folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"

    def load(self, cell: Cell) -> Result | None:
        """The result of a finished cell; None if it was not run, or if its file was damaged."""
        try:
            return json.loads(self.path(cell).read_text(encoding="utf-8"))["result"]
        except (FileNotFoundError, json.JSONDecodeError, KeyError):
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

    def _fingerprint(self) -> str:
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


def _run_and_keep(job: tuple[Path, Cell], place: Place) -> None:
    path, cell = job
    result = cell.run(place)
    text = json.dumps({"version": RESULTS_VERSION, **cell.identity, "result": result}, allow_nan=False)
    temporary = path.with_suffix(f".{os.getpid()}.part")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(path)


def _problem_of(cell: Cell) -> str:
    if isinstance(cell, TrainingCell):
        return (
            cell.settings.data.model_dump_json() + cell.settings.model.model_dump_json() + str(cell.settings.run.seed)
        )
    return ""


def _is_accelerator(device: str | None) -> bool:
    if device is None:
        return torch.cuda.is_available()
    return not device.startswith("cpu")
