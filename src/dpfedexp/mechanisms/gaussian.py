"""Gaussian noise, added by the server (central) or by every client (local).

The noise multiplier z is the noise's standard deviation on a sum in units of the clip C: the paper's central setting is z = 5 on
the sum over clients, its local setting z = 0.7 on each client's own update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from dpfedexp.accounting.events import Adjacency, Event, Sampling
from dpfedexp.accounting.gaussian_events import central_gaussian_event, local_gaussian_event
from dpfedexp.clipping import Clipped, clip, row_norms
from dpfedexp.errors import require
from dpfedexp.mechanisms.base import Noise, Release, Report, make_sums, total
from dpfedexp.mechanisms.free import lift
from dpfedexp.sums import Sums

Numerator = Literal["free", "paper", "naive"]


@dataclass(frozen=True)
class CentralGaussian:
    """The trusted server adds noise to the sum and divides by a public constant.

    Formal guarantee: the sum of rows that `collect` has put into the ball of radius C (it does not trust the clients' own clipping)
    changes by at most 2C (replace-one) or C (add-remove) with one client, and gets noise of standard deviation zC that is fixed
    before the round. With `numerator="paper"`, Σ‖Δ_i‖² ∈ [0, C²] per client gets noise `scalar_multiplier`·C²; with `count_noise`,
    the number of clients within the clip gets that noise. All are one joint event. With `numerator="free"` the step size is free.
    """

    clip: float
    noise_multiplier: float
    adjacency: Adjacency = "replace-one"
    numerator: Literal["free", "paper"] | None = None
    scalar_multiplier: float | None = None
    count_noise: float | None = None

    def width(self, dimension: int) -> int:
        return dimension + (self.numerator == "free")

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        vector = lift(clipped.vectors, self.clip) if self.numerator == "free" else clipped.vectors
        return Report(vector, within=clipped.within if self.count_noise is not None else None)

    def collect(self, report: Report) -> Sums:
        rows = clip(report.vector, self.clip).vectors
        squares = row_norms(rows).square().sum() if self.numerator == "paper" else None
        return make_sums(total(rows), squares, report.within, len(rows))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        server = torch.zeros(1, dtype=torch.int64)
        scale = self.noise_multiplier * self.clip
        drawn = noise.normal(server, len(sums.vector), sums.vector.device, torch.float64)[0]
        mean = (sums.vector + scale * drawn) / denominator
        xi, count = (float(v) for v in scalar_noise.normal(server, 2, torch.device("cpu"), torch.float64)[0])
        within = None
        if self.count_noise is not None:
            # Centred, Σ(b_i − ½) + ½·(public cohort), so that one client more or less moves it by only a half.
            centred = float(sums.within) - 0.5 * sums.count
            within = 0.5 + (centred + self.count_noise * count) / denominator
        if self.numerator == "free":
            return Release(mean[:-1], float(mean[-1]), within, self.clip)
        statistic = None
        if self.numerator == "paper":
            assert self.scalar_multiplier is not None
            statistic = (float(sums.squares) + self.scalar_multiplier * self.clip**2 * xi) / denominator
        return Release(mean, statistic, within, self.clip)

    def event(self, sampling: Sampling) -> Event:
        require(
            self.numerator != "paper" or self.scalar_multiplier is not None,
            "scalar_multiplier is None with numerator 'paper', which releases the squared norms; it must be a positive number.",
        )
        return central_gaussian_event(
            self.noise_multiplier,
            self.adjacency,
            sampling,
            scalar_multiplier=self.scalar_multiplier if self.numerator == "paper" else None,
            count_noise=self.count_noise,
        )


@dataclass(frozen=True)
class LocalGaussian:
    """Every client adds its own noise; the server is not trusted.

    Formal guarantee: a client's report is its vector inside the ball of radius C plus noise of standard deviation zC per
    coordinate: replacing the client's whole data set moves it by at most 2C. Everything the server does is post-processing, the
    step size included.
    """

    clip: float
    noise_multiplier: float
    numerator: Numerator | None = None

    @property
    def sigma(self) -> float:
        return self.noise_multiplier * self.clip

    def width(self, dimension: int) -> int:
        return dimension + (self.numerator == "free")

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        rows = lift(clipped.vectors, self.clip) if self.numerator == "free" else clipped.vectors
        drawn = noise.normal(clients, rows.shape[1], rows.device, rows.dtype)
        return Report(rows + self.sigma * drawn)

    def collect(self, report: Report) -> Sums:
        squares = row_norms(report.vector).square().sum() if self.numerator in ("paper", "naive") else None
        return make_sums(total(report.vector), squares, None, len(report.vector))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        mean = sums.vector / max(sums.count, 1)
        if self.numerator == "free":
            return Release(mean[:-1], float(mean[-1]), None, self.clip)
        statistic = float(sums.squares) / max(sums.count, 1) if self.numerator else None
        return Release(mean, statistic, None, self.clip)

    def event(self, sampling: Sampling) -> Event:
        return local_gaussian_event(self.noise_multiplier, sampling, squares=self.numerator in ("paper", "naive"))
