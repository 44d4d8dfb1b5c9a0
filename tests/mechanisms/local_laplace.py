"""A mechanism that the library does not know, as a user would add it: one file, and one line in the registry."""

import math
from dataclasses import dataclass, replace

from torch import Tensor

from dpfedexp.accounting.events import PureEvent, Sampling
from dpfedexp.core.clipping import Clipped
from dpfedexp.core.noise import Noise
from dpfedexp.core.sums import Sums
from dpfedexp.errors import require
from dpfedexp.mechanisms import Mechanism, MechanismSpec, Release, Report
from dpfedexp.mechanisms.base import make_sums, total

ENTRY = "tests.mechanisms.local_laplace:LocalLaplace"


@dataclass(frozen=True)
class LocalLaplace(Mechanism):
    """Every client adds Laplace noise to each coordinate.

    Formal guarantee: updates in the ball of radius C differ by at most 2C√d in the 1-norm, so noise of scale 2C√d/ε makes a report
    ε-locally differentially private.
    """

    kind = "local-laplace"
    is_local = True

    clip: float
    dimension: int
    epsilon: float
    rounded: bool = False

    @classmethod
    def check_spec(cls, spec: MechanismSpec) -> None:
        super().check_spec(spec)
        require(spec.target_epsilon is not None, "target_epsilon is missing; local-laplace needs one.")

    @classmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        return spec.drawn(LocalLaplace(spec.radius, spec.dimension, (spec.target_epsilon or 0.0) / spec.rounds))

    @property
    def spread(self) -> float:
        return 2.0 * self.clip * math.sqrt(self.dimension) / self.epsilon

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        rows = clipped.vectors
        centered = noise.uniform(clients, rows.shape[1]).to(rows.device) - 0.5
        drawn = -self.spread * centered.sign() * (-2.0 * centered.abs()).log1p()
        noisy = rows.double() + drawn
        if self.rounded:
            step = 2.0 ** (math.frexp(self.spread)[1] - 20)
            noisy = (noisy / step).round() * step
        return Report(noisy.to(rows.dtype))

    def collect(self, report: Report) -> Sums:
        return make_sums(total(report.vector), None, None, len(report.vector))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        return Release(sums.vector / max(sums.count, 1), None, {}, self.clip)

    def norm_bound(self, width: int) -> float:
        return self.clip + 60.0 * self.spread * math.sqrt(width)

    def event(self, sampling: Sampling) -> PureEvent:
        return PureEvent(self.epsilon, "local", sampling=sampling)

    @property
    def noise_kind(self) -> bool:
        return self.rounded

    def secure(self, strict: bool = False) -> Mechanism:
        require(not strict, "secure is 'strict' with Laplace noise; use secure = true.")
        return replace(self, rounded=True)
