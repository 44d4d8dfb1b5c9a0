"""Gaussian noise that every client adds to its own update, plain and on a lattice: the paper's local setting (z = 0.7 there)."""

from dataclasses import dataclass, replace

from scipy.special import chdtri
from torch import Tensor

from dpfedexp.accounting.events import GaussianEvent, Sampling, local_gaussian
from dpfedexp.core.clipping import Clipped, row_norms
from dpfedexp.core.noise import STRICT_EXCESS, Noise, add_noise, check_room, step_for, truncate
from dpfedexp.core.sums import Release, Sums
from dpfedexp.errors import checked, require
from dpfedexp.mechanisms.base import Gaussian, Mechanism, MechanismSpec, Numerator, OnGrid, Report, make_sums, total

_NEVER = 1e-15
"""The probability that an honest report is longer than `norm_bound`."""


@checked
@dataclass(frozen=True)
class LocalGaussian(Gaussian):
    """Every client adds its own noise; the server is not trusted.

    Formal guarantee: a client's report is its vector inside the ball of radius C plus noise of standard deviation zC per
    coordinate; replacing all data of the client changes the vector by at most 2C. Everything that the server computes, including
    the step size, is post-processing.
    """

    kind = "local-gaussian"
    is_local = True
    numerators = ("free", "paper", "naive")

    clip: float
    noise_multiplier: float
    numerator: Numerator | None = None

    @classmethod
    def check_spec(cls, spec: MechanismSpec) -> None:
        super().check_spec(spec)
        cls.check_noise(spec)

    @classmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        return cls.with_noise(spec, lambda z: LocalGaussian(spec.radius, z, spec.numerator))

    @property
    def sigma(self) -> float:
        return self.noise_multiplier * self.clip

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        rows = self._rows(clipped)
        drawn = noise.normal(clients, rows.shape[1], rows.device, rows.dtype)
        return Report(rows + self.sigma * drawn)

    def collect(self, report: Report) -> Sums:
        squares = row_norms(report.vector).square().sum() if self._uses_squares else None
        return make_sums(total(report.vector), squares, None, len(report.vector))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        mean = sums.vector / max(sums.count, 1)
        statistic = float(sums.squares) / max(sums.count, 1) if self.numerator else None
        return self._released(mean, statistic, {}, self.noise_variance(denominator, sums.count), self.sigma)

    def noise_variance(self, denominator: float, count: float) -> float:
        return self.sigma**2 / max(count, 1)

    def check_report(self, report: Report) -> None:
        norm = float(row_norms(report.vector).max())
        require(norm <= self.norm_bound(report.vector.shape[1]), "it is longer than any honest report")

    def norm_bound(self, width: int) -> float:
        bound: float = self.clip + self.sigma * float(chdtri(width, _NEVER)) ** 0.5
        return bound

    def event(self, sampling: Sampling) -> GaussianEvent:
        return local_gaussian(self.noise_multiplier, sampling, squares=self._uses_squares)

    def secure(self, strict: bool = False) -> Mechanism:
        return SecureLocalGaussian(**self.settings(), strict=strict)

    @property
    def _uses_squares(self) -> bool:
        return self.numerator in ("paper", "naive")


@dataclass(frozen=True)
class SecureLocalGaussian(OnGrid, LocalGaussian):
    """`LocalGaussian` on a grid: every coordinate of a report is a multiple of the grid's step (`core.noise.step_for`).

    Formal guarantee: the row is truncated toward zero to the grid before the noise is added, so its sensitivity is at
    most 2C. The report is the rounding of the ideal report. In strict mode the noise is discrete Gaussian, charged at
    (1 + 2⁻²⁰)·μ.

    An observer of only the sum of n reports sees the sum of the rows plus n rounded Gaussians. With 2²⁰ steps per
    standard deviation, that sum is, up to a probability of about e^(−2π²·2⁴⁰), distributed like a Gaussian with n times
    the variance plus independent noise, so it is at least as private as that Gaussian. In strict mode the grid is finer
    than single precision, so every report is also rounded to single precision. The sum of the rounded reports can't be
    computed from the sum of the exact ones, so nothing is claimed about it.
    """

    strict: bool = False

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        rows = self._rows(clipped)
        step = step_for(self.sigma, self.strict)
        check_room(1, self.clip, step)
        noisy = add_noise(truncate(rows, step).double() * step, step, self.sigma, noise, self.strict)
        return Report(noisy.to(rows.dtype))

    def event(self, sampling: Sampling) -> GaussianEvent:
        event = replace(super().event(sampling), attained=False)
        if not self.strict:
            return event
        rounded = replace(event, beyond_sum="rounding") if event.beyond_sum == "nothing" else event
        return rounded.scaled(1.0 + STRICT_EXCESS)
