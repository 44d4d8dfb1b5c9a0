"""What every mechanism owns: a client's side, the server's side, and the event that the accountant charges."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpfedexp.accounting.events import Event, Sampling
from dpfedexp.clipping import BLOCK, Clipped
from dpfedexp.noise import Noise
from dpfedexp.sums import Sums


@dataclass(frozen=True)
class Report:
    """What a chunk of clients sends, one row per client.

    vector  the update, the update with the free rule's coordinate, or PrivUnit's unit vector V
    level   PrivUnit's randomised level Ĵ, else None
    within  the bit that adaptive clipping sums, else None
    """

    vector: Tensor
    level: Tensor | None = None
    within: Tensor | None = None

    def first(self, count: int) -> Report:
        """The reports of the first clients; rows behind them only filled up a shape."""
        if count == len(self.vector):
            return self
        level, within = (None if part is None else part[:count] for part in (self.level, self.within))
        return Report(self.vector[:count], level, within)


@dataclass(frozen=True)
class Release:
    """What leaves the mechanism, and may be seen by anyone.

    c_bar      the mean update that moves the model
    statistic  the scalar that the step-size rule asks for, None where it asks for none
    within     the noisy fraction of clients within the clip, None without adaptive clipping
    clip       the radius C that was in force
    """

    c_bar: Tensor
    statistic: float | None
    within: float | None
    clip: float


class Mechanism(Protocol):
    """One object that owns all three sides of the same promise, so that noise and accounting can't drift apart."""

    @property
    def clip(self) -> float: ...

    def width(self, dimension: int) -> int:
        """How long `Sums.vector` is for a model of this dimension."""
        ...

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        """The client's side: from updates inside the ball to what is sent."""
        ...

    def collect(self, report: Report) -> Sums:
        """The server's side of one chunk; enforces again whatever the guarantee of the others rests on."""
        ...

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        """From sums to what may be seen. `denominator` is public; the two noises are independent streams."""
        ...

    def event(self, sampling: Sampling) -> Event:
        """What one round costs."""
        ...


def total(rows: Tensor) -> Tensor:
    """Σ of the rows in double precision."""
    if rows.shape[1] <= BLOCK or rows.device.type != "cpu" or len(rows) == 0:
        return rows.sum(0, dtype=torch.float64)
    out = torch.empty(rows.shape[1], dtype=torch.float64)
    for part, block in zip(out.split(BLOCK), rows.split(BLOCK, dim=1), strict=True):
        part.copy_(block[0])
        for row in block[1:]:
            part.add_(row)
    return out


def make_sums(vector: Tensor, squares: Tensor | None, within: Tensor | None, count: int) -> Sums:
    """Sums of a chunk, with zeros for what the mechanism does not ask for."""
    nothing = torch.zeros((), dtype=torch.float64, device=vector.device)
    return Sums(
        vector,
        nothing if squares is None else squares,
        nothing if within is None else within.to(vector.device).sum(dtype=torch.float64),
        count,
    )
