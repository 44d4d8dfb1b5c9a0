"""One round from w = 0 in the local settings: naive, proposed and target η_g from the very same reports."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar

import torch

from dpfedexp.core import step_size
from dpfedexp.core.batches import schedule
from dpfedexp.core.clipping import clip, row_norms
from dpfedexp.core.noise.streams import Streams
from dpfedexp.core.step_size import AnyRule, initial_memory, next_step
from dpfedexp.data import synthetic_regression
from dpfedexp.engine.prepare import prepare
from dpfedexp.mechanisms import Mechanism
from dpfedexp.models import linear_regression
from reproduction.paper.experiments import experiment
from reproduction.paper.results.full_settings import in_full
from reproduction.paper.results.planned import Place, Result

RULES = ("naive", "proposed", "target")


@dataclass(frozen=True)
class InitialStepRun:
    """η_g⁽⁰⁾ of the paper's synthetic LDP setting with `clients` clients, for several seeds of data and noise."""

    setting: str
    clients: int
    repetitions: int

    curves: ClassVar[tuple[str, ...]] = RULES
    seed: ClassVar[None] = None

    @property
    def name(self) -> str:
        return f"{self.setting}, M = {self.clients}, {self.repetitions} repetitions"

    @property
    def full_settings(self) -> dict[str, Any]:
        settings = in_full(experiment(f"synthetic-{self.setting}-fedexp"))
        return settings | {"initial_step": {"clients": self.clients, "repetitions": self.repetitions}}

    @property
    def needs_images(self) -> bool:
        return False

    @property
    def cost(self) -> float:
        return 3.0 * self.clients * self.repetitions

    @property
    def problem(self) -> str:
        return self.name

    def run(self, place: Place) -> Result:
        rows = [_step_sizes(self.setting, self.clients, seed) for seed in range(self.repetitions)]
        curves = {rule: [row[rule] for row in rows] for rule in RULES}
        return {"finals": {rule: fmean(values) for rule, values in curves.items()}, "curves": curves}


def _step_sizes(setting: str, clients: int, seed: int) -> dict[str, float]:
    settings = experiment(f"synthetic-{setting}-fedexp")
    dimension = settings.data.dimension
    federation = synthetic_regression(clients, dimension, seed).federation
    algorithm = settings.build_algorithm()
    simulation, _ = prepare(
        linear_regression(dimension), federation, algorithm, local=settings.build_local(), rounds=1, device="cpu"
    )
    everyone = torch.arange(clients)
    plan = schedule(settings.build_local(), federation.sizes, lambda row: Streams(seed).at("batches", 1).generator(row))
    updates = simulation.trainer(torch.zeros(dimension), everyone, plan, 1)
    return from_updates(simulation.mechanism, algorithm.rule, updates, seed)


def from_updates(mechanism: Mechanism, rule: AnyRule, updates: torch.Tensor, seed: int) -> dict[str, float]:
    """The three step sizes of one round of reports."""
    clients = torch.arange(len(updates))
    clipped = clip(updates, mechanism.clip)
    streams = Streams(seed)
    report = mechanism.randomize(clipped, clients, streams.at("local noise", 1))
    release = mechanism.release(
        mechanism.collect(report), len(clients), streams.at("central noise", 1), streams.at("central scalar noise", 1)
    )
    c_bar = release.c_bar
    return {
        "naive": step_size.target(float(row_norms(mechanism.estimate(report)).square().mean()), c_bar),
        "proposed": next_step(rule, release, initial_memory(rule, c_bar))[0],
        "target": step_size.target(float(row_norms(clipped.vectors).square().mean()), c_bar),
    }
