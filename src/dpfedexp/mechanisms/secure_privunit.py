"""PrivUnit's report on a fixed grid."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from dpfedexp.accounting.events import Event, PrivUnitEvent, Sampling
from dpfedexp.clipping import Clipped
from dpfedexp.mechanisms.base import Noise, Report
from dpfedexp.mechanisms.privunit import PrivUnit


@dataclass(frozen=True)
class SecurePrivUnit(PrivUnit):
    """`PrivUnit` computed in double precision and rounded to a public grid of about 2⁻¹²/√d.

    Formal guarantee: that of `PrivUnit` for the ideal direction, of which the report is the rounding. The computed direction
    differs from the ideal one by about 2⁻⁵²/√d in a coordinate, so a report is not exactly that rounding with probability about
    d·2⁻⁴⁰.
    """

    @property
    def step(self) -> float:
        return 2.0 ** (math.frexp(self.dimension**-0.5)[1] - 1 - 12)

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        kind = clipped.vectors.dtype
        report = super().randomize(Clipped(clipped.vectors.double(), clipped.within), clients, noise)
        return Report((report.vector / self.step).round().mul(self.step).to(kind), level=report.level)

    def event(self, sampling: Sampling) -> Event:
        event = super().event(sampling)
        assert isinstance(event, PrivUnitEvent)
        return replace(event, attained=False)
