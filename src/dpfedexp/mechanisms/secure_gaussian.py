"""Central and local Gaussian noise on the grid. Same fields as the plain mechanisms, and what little the grid costs is charged."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from dpfedexp.accounting.events import Event, GaussianEvent, Sampling
from dpfedexp.clipping import Clipped, clip, row_norms
from dpfedexp.mechanisms.base import Noise, Release, Report, make_sums
from dpfedexp.mechanisms.free import lift
from dpfedexp.mechanisms.gaussian import CentralGaussian, LocalGaussian
from dpfedexp.noise.lattice import add_noise, check_room, step_for, truncate
from dpfedexp.sums import Sums

STRICT_EXCESS = 2.0**-20
"""How much more than the Gaussian's μ strict noise is charged, as a fraction; docs/security.md has the proof and its range."""

_SQUARE_EXCESS = 2.0**-19
"""Twice the largest step of the squared norms in units of their own noise: truncation, and the rounding of the norms themselves."""


@dataclass(frozen=True)
class SecureCentralGaussian(CentralGaussian):
    """`CentralGaussian` with integer sums and noise on the same grid.

    Formal guarantee: rows are clipped and then truncated toward zero, so the sensitivities are those of `CentralGaussian`, and
    each output is the rounding of its ideal output. With `numerator="paper"` truncation moves the difference of two squared
    norms by less than a step, which is added to the joint μ. In strict mode every query has discrete Gaussian noise, charged at
    (1 + 2⁻²⁰)·μ.
    """

    strict: bool = False

    @property
    def _step(self) -> float:
        return step_for(self.noise_multiplier * self.clip, self.strict)

    @property
    def _square_step(self) -> float:
        assert self.scalar_multiplier is not None
        return step_for(self.scalar_multiplier * self.clip**2, self.strict)

    def collect(self, report: Report) -> Sums:
        check_room(len(report.vector), self.clip, self._step)
        units = truncate(clip(report.vector, self.clip).vectors, self._step)
        squares = None
        if self.numerator == "paper":
            norms = row_norms(units.double() * self._step).clamp_max(self.clip)
            squares = truncate(norms.square(), self._square_step).sum().double() * self._square_step
        return make_sums(units.sum(0).double() * self._step, squares, report.within, len(units))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        check_room(sums.count, self.clip, self._step)
        deviation = self.noise_multiplier * self.clip
        mean = add_noise(sums.vector[None], self._step, deviation, noise, self.strict)[0] / denominator
        within = statistic = None
        if self.count_noise is not None:
            # Steps are powers of two and far below one half, so halves are on the grid.
            step = min(0.5, step_for(self.count_noise, self.strict))
            centred = (sums.within - 0.5 * sums.count).reshape(1, 1)
            noisy = add_noise(centred, step, self.count_noise, scalar_noise, self.strict)
            within = 0.5 + float(noisy) / denominator
        if self.numerator == "free":
            return Release(mean[:-1], float(mean[-1]), within, self.clip)
        if self.numerator == "paper":
            assert self.scalar_multiplier is not None
            check_room(sums.count, self.clip**2, self._square_step)
            deviation = self.scalar_multiplier * self.clip**2
            noisy = add_noise(sums.squares.reshape(1, 1), self._square_step, deviation, scalar_noise, self.strict)
            statistic = float(noisy) / denominator
        return Release(mean, statistic, within, self.clip)

    def event(self, sampling: Sampling) -> Event:
        event = super().event(sampling)
        assert isinstance(event, GaussianEvent)
        event = replace(event, attained=False)
        if self.numerator == "paper":
            # Left out, a truncated square is still at most C²; only the trade of one square for another can gain by truncation.
            replaced = event.joint_mu if self.adjacency == "replace-one" else event.other_mu
            more = None if replaced is None else replaced + _SQUARE_EXCESS
            event = replace(event, joint_mu=more) if self.adjacency == "replace-one" else replace(event, other_mu=more)
        return _strict(event) if self.strict else event


@dataclass(frozen=True)
class SecureLocalGaussian(LocalGaussian):
    """`LocalGaussian` whose report is a whole number of steps in every coordinate.

    Formal guarantee: the row is truncated toward zero before the noise, so its sensitivity is at most 2C, and the report is the
    rounding of the ideal one. In strict mode the noise is discrete Gaussian, charged at (1 + 2⁻²⁰)·μ.

    Whoever sees only the sum of n reports sees the sum of the rows and of n rounded Gaussians. With 2²⁰ steps to a deviation that
    sum has, up to a probability of about e^(−2π²·2⁴⁰), the law of a Gaussian of n times the variance plus independent noise, so
    it is no less private than that Gaussian. In strict mode every report is rounded to single precision as well, which the sum
    does not determine, so nothing is claimed about it.
    """

    strict: bool = False

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        rows = lift(clipped.vectors, self.clip) if self.numerator == "free" else clipped.vectors
        step = step_for(self.sigma, self.strict)
        check_room(1, self.clip, step)
        noisy = add_noise(truncate(rows, step).double() * step, step, self.sigma, noise, self.strict)
        return Report(noisy.to(rows.dtype))

    def event(self, sampling: Sampling) -> Event:
        event = super().event(sampling)
        assert isinstance(event, GaussianEvent)
        event = replace(event, attained=False)
        if not self.strict:
            return event
        return _strict(replace(event, beside_sum="rounding") if event.beside_sum == "nothing" else event)


def _strict(event: GaussianEvent) -> GaussianEvent:
    more = 1.0 + STRICT_EXCESS
    queries = tuple(
        replace(
            q,
            bound=q.bound * more,
            sensitivity=q.sensitivity * more,
            diameter=None if q.diameter is None else q.diameter * more,
        )
        for q in event.queries
    )
    return replace(
        event,
        queries=queries,
        joint_mu=None if event.joint_mu is None else event.joint_mu * more,
        other_mu=None if event.other_mu is None else event.other_mu * more,
    )
