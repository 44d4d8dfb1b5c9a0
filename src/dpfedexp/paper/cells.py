"""Cells: the independent computations behind every table and figure."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import nn

from dpfedexp.config import Settings, problem
from dpfedexp.config.problem import Problem
from dpfedexp.evaluation import Evaluate
from dpfedexp.json_values import finite
from dpfedexp.simulation.train import train

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
        # The partition was asked for by its number of clients, which is therefore a public number.
        counted = settings.algorithm.adjacency == "add-remove" and settings.participation.population is None
        population = settings.data.clients if counted else settings.participation.population
        began = time.perf_counter()
        done = train(
            posed.model,
            posed.federation,
            settings.build_algorithm(),
            local=settings.build_local(),
            participation=settings.build_participation(),
            population=population,
            test=posed.test,
            evaluate=posed.evaluate,
            progress=False,
            execution=replace(settings.build_execution(), device=place.device),
            **settings.run_options(),
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


def _is_accelerator(device: str | None) -> bool:
    if device is None:
        return torch.cuda.is_available()
    return not device.startswith("cpu")
