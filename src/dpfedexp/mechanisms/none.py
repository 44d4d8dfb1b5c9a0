"""No privacy at all: what FedAvg and FedEXP are without noise."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from dpfedexp.accounting.events import Event, NonPrivateEvent, Sampling
from dpfedexp.clipping import Clipped, row_norms
from dpfedexp.mechanisms.base import Noise, Release, Report, make_sums, total
from dpfedexp.sums import Sums


@dataclass(frozen=True)
class NoPrivacy:
    """Sends the update as it is. Guarantee: none; event: `NonPrivateEvent`."""

    clip: float = math.inf

    def width(self, dimension: int) -> int:
        return dimension

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        return Report(clipped.vectors)

    def collect(self, report: Report) -> Sums:
        squares = row_norms(report.vector).square().sum()
        return make_sums(total(report.vector), squares, None, len(report.vector))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        count = max(sums.count, 1)
        return Release(sums.vector / count, float(sums.squares) / count, None, self.clip)

    def event(self, sampling: Sampling) -> Event:
        return NonPrivateEvent()
