"""One round from w = 0 in the local settings: naive, proposed and target η_g from the very same reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dpfedexp import step_size
from dpfedexp.batches import schedule
from dpfedexp.clipping import clip, row_norms
from dpfedexp.data import synthetic_regression
from dpfedexp.mechanisms import LocalGaussian, Mechanism, PrivUnit
from dpfedexp.models import linear_regression
from dpfedexp.noise.streams import Streams
from dpfedexp.paper.cells import Place, Result
from dpfedexp.paper.experiments import experiment
from dpfedexp.simulation.train import prepare

RULES = ("naive", "proposed", "target")


@dataclass(frozen=True)
class InitialStepCell:
    """η_g⁽⁰⁾ of the paper's synthetic LDP setting with `clients` clients, for several seeds of data and noise."""

    setting: str
    clients: int
    repetitions: int

    @property
    def identity(self) -> dict[str, Any]:
        settings = experiment(f"synthetic-{self.setting}-fedexp").model_dump(mode="json", exclude_defaults=True)
        return {"initial step": settings | {"clients": self.clients, "repetitions": self.repetitions}}

    @property
    def needs_images(self) -> bool:
        return False

    @property
    def cost(self) -> float:
        return 3.0 * self.clients * self.repetitions

    def run(self, place: Place) -> Result:
        rows = [_step_sizes(self.setting, self.clients, seed) for seed in range(self.repetitions)]
        return {rule: [row[rule] for row in rows] for rule in RULES}


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
    return from_updates(simulation.mechanism, updates, seed)


def from_updates(mechanism: Mechanism, updates: torch.Tensor, seed: int) -> dict[str, float]:
    """The three step sizes of one round of reports."""
    clients = torch.arange(len(updates))
    clipped = clip(updates, mechanism.clip)
    streams = Streams(seed)
    report = mechanism.randomize(clipped, clients, streams.at("local noise", 1))
    release = mechanism.release(
        mechanism.collect(report), len(clients), streams.at("central noise", 1), streams.at("central scalar noise", 1)
    )
    c_bar, statistic = release.c_bar, release.statistic
    assert statistic is not None
    if isinstance(mechanism, LocalGaussian):
        mean_square_c = statistic
        proposed = step_size.ldp_gaussian(statistic, c_bar, mechanism.sigma)
    else:
        assert isinstance(mechanism, PrivUnit)
        mean_square_c = float(row_norms(mechanism.reconstruct(report)[1]).square().mean())
        proposed = step_size.ldp_privunit(statistic, c_bar)
    return {
        "naive": step_size.naive(mean_square_c, c_bar),
        "proposed": proposed,
        "target": step_size.target(float(row_norms(clipped.vectors).square().mean()), c_bar),
    }
