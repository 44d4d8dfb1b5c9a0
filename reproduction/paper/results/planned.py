"""What a section asks for: runs, each a value that says all of its settings and knows how to run itself."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import nn

from dpfedexp import Full, OnAdvice
from dpfedexp.config import Settings, problem
from dpfedexp.config.problem import Problem
from dpfedexp.engine.advice import silence
from dpfedexp.engine.train import train
from dpfedexp.evaluation import Evaluate
from dpfedexp.files import finite
from reproduction.paper.results.full_settings import in_full
from reproduction.paper.results.spread import average_of_last_rounds

Result = dict[str, Any]
"""What a run leaves: `finals` and `curves` (name → number, name → numbers), and what it promised."""

FINALS = ("distance", "nonprivate_training_loss", "test_accuracy", "test_loss")


@dataclass(frozen=True)
class Place:
    """Where runs are made: the device, the folder of the images, and how many processes side by side.

    By default one process to a core, and a single one on an accelerator, where the data then stay from run to run.
    """

    device: str | None = None
    data: str | None = None
    jobs: int | None = None

    @property
    def workers(self) -> int | None:
        return self.jobs or (1 if _is_accelerator(self.device) else None)


class PlannedRun(Protocol):
    """One independent computation. It is a value: frozen, comparable, and cheap to send to another process."""

    @property
    def name(self) -> str:
        """What the section calls it; for readers, not for lookup."""
        ...

    @property
    def seed(self) -> int | None: ...

    @property
    def full_settings(self) -> dict[str, Any]:
        """Everything the result depends on but the images, as JSON, with every default spelled out."""
        ...

    @property
    def curves(self) -> tuple[str, ...]:
        """Which of the result's curves the section shows, so which its record keeps."""
        ...

    @property
    def needs_images(self) -> bool: ...

    @property
    def cost(self) -> float:
        """How long it takes beside the others, roughly."""
        ...

    @property
    def problem(self) -> str:
        """Runs with the same text share their data and their model."""
        ...

    def run(self, place: Place) -> Result: ...


@dataclass(frozen=True)
class TrainingRun:
    """A whole simulated run: `settings`, its seed included."""

    settings: Settings
    name: str = field(default="", compare=False)
    curves: tuple[str, ...] = field(default=(), compare=False)

    @property
    def seed(self) -> int:
        return self.settings.run.seed

    @property
    def full_settings(self) -> dict[str, Any]:
        return in_full(self.settings)

    @property
    def needs_images(self) -> bool:
        return self.settings.data.kind == "mnist"

    @property
    def cost(self) -> float:
        small = self.settings.model.name == "mnist_ldp_net"
        a_client = 30.0 if small else 100.0 if self.needs_images else 1.0
        return self.settings.run.rounds * self.settings.data.clients * a_client

    @property
    def problem(self) -> str:
        return f"{self.settings.data.model_dump_json()}{self.settings.model.model_dump_json()}{self.seed}"

    def run(self, place: Place) -> Result:
        settings = self.settings
        built = _problem(
            settings.data.model_dump_json(), settings.model.model_dump_json(), settings.run.seed, place.data
        )
        # The partition was asked for by its number of clients, which is therefore a public number.
        counted = settings.algorithm.adjacency == "add-remove" and settings.participation.population is None
        population = settings.data.clients if counted else settings.participation.population
        done = train(
            built.model,
            built.federation,
            settings.build_algorithm(),
            local=settings.build_local(),
            participation=replace(cast(Full, settings.build_participation()), population=population),
            evaluate=settings.build_evaluate(built.evaluate or built.test),
            execution=replace(settings.build_execution(), device=place.device),
            on_round=OnAdvice(silence),
            **settings.run_options(),
        )
        history = [{key: finite(value) for key, value in record.items()} for record in done.history]
        return {
            "finals": finals(history),
            "curves": columns(history),
            "epsilon_round": finite(done.privacy.epsilon_round),
            "epsilon_total": finite(done.privacy.epsilon_total),
            "delta": done.privacy.delta,
            "parameters": sum(p.numel() for p in done.model.parameters()),
            "privacy": done.privacy.text,
        }


def trainings(settings: Iterable[Settings], name: str, curves: tuple[str, ...] = ()) -> list[PlannedRun]:
    """The same run once for every seed."""
    return [TrainingRun(one, f"{name}, seed {one.run.seed}", curves) for one in settings]


def finals(history: list[dict[str, Any]]) -> dict[str, float | None]:
    """Every metric averaged over the last rounds; None where the run diverged."""
    return {name: average_of_last_rounds(history, name) for name in FINALS if any(name in record for record in history)}


def columns(history: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Records of rounds as curves: None in a round that was not evaluated, `DIVERGED` where the value was not finite."""
    names = dict.fromkeys(name for record in history for name in record if name != "seconds")
    return {
        name: [None if name not in record else DIVERGED if record[name] is None else record[name] for record in history]
        for name in names
    }


DIVERGED = "diverged"


def points(result: Result, metric: str) -> list[tuple[int, float | None]]:
    """(round, value) of a curve, without the rounds that were not evaluated; the value is None where the run diverged."""
    pairs = zip(result["curves"]["round"], result["curves"][metric], strict=True)
    return [(number, None if value == DIVERGED else value) for number, value in pairs if value is not None]


@lru_cache(maxsize=4)
def _problem(data: str, model: str, seed: int, folder: str | None) -> Problem:
    """The problem of the last few runs is kept, so that runs in a row that share it find it on their device."""
    settings = Settings.model_validate({"data": json.loads(data), "model": json.loads(model), "run": {"seed": seed}})
    built = problem.build(settings, folder)
    if settings.data.kind != "synthetic" or built.evaluate is None:
        return built
    return Problem(built.federation, built.model, evaluate=_with_training_loss(built, built.evaluate))


def _with_training_loss(built: Problem, evaluate: Evaluate) -> Evaluate:
    """Adds the mean of ½(xᵀw − y)² over the clients: what the paper tunes by, and not private."""

    def both(model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        inputs, targets = built.federation.prepare(built.federation.inputs, built.federation.targets, device)
        with torch.no_grad():
            loss = 0.5 * (model(inputs) - targets).double().square().mean()
        return {**evaluate(model), "nonprivate_training_loss": float(loss)}

    return both


def _is_accelerator(device: str | None) -> bool:
    if device is None:
        return torch.cuda.is_available()
    return not device.startswith("cpu")
