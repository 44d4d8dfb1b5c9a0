"""Gaussian noise that a trusted server adds to the sum, plain and on a lattice.

The noise multiplier z is the noise's standard deviation on the sum in units of the clip C: the paper's central setting is z = 5.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from dpfedexp.accounting.events import Adjacency, GaussianEvent, Sampling
from dpfedexp.accounting.events.charges import central_gaussian
from dpfedexp.arguments import checked
from dpfedexp.clipping import AdaptiveClip, Clipped, clip, row_norms
from dpfedexp.errors import require
from dpfedexp.mechanisms.base import Mechanism, Part, Release, Report, Secure, Terms, make_sums, total
from dpfedexp.mechanisms.calibration import check_gaussian, with_noise
from dpfedexp.mechanisms.free import lift
from dpfedexp.noise import Noise
from dpfedexp.noise.lattice import STRICT_EXCESS, add_noise, check_room, step_for, truncate
from dpfedexp.sums import Sums

_SQUARE_EXCESS = 2.0**-19
"""Twice the largest step of the squared norms in units of their own noise: truncation, and the rounding of the norms themselves."""


@checked
@dataclass(frozen=True)
class CentralGaussian(Mechanism):
    """The trusted server adds noise to the sum and divides by a public constant.

    Formal guarantee: the sum of rows that `collect` has put into the ball of radius C (it does not trust the clients' own clipping)
    changes by at most 2C (replace-one) or C (add-remove) with one client, and gets noise of standard deviation zC that is fixed
    before the round. With `numerator="paper"`, Σ‖Δ_i‖² ∈ [0, C²] per client gets noise `scalar_multiplier`·C²; with `count_noise`,
    the number of clients within the clip gets that noise. All are one joint event. With `numerator="free"` the step size is free.
    """

    kind = "central-gaussian"
    is_local = False
    numerators = ("free", "paper")

    clip: float
    noise_multiplier: float
    adjacency: Adjacency = "replace-one"
    numerator: Literal["free", "paper"] | None = None
    scalar_multiplier: float | None = None
    count_noise: float | None = None

    def __post_init__(self) -> None:
        require(
            self.numerator != "paper" or self.scalar_multiplier is not None,
            "the mechanism's scalar_multiplier is missing; numerator 'paper' needs the noise on the squared norms.",
        )

    @classmethod
    def check_terms(cls, terms: Terms) -> None:
        check_gaussian(terms)
        cls.check_numerator(terms)

    @classmethod
    def bound(cls, terms: Terms) -> Mechanism:
        def make(z: float) -> CentralGaussian:
            if isinstance(terms.clip, AdaptiveClip):
                radius, count_noise = terms.clip.initial, terms.clip.noise_for(terms.cohort, z)
                # The count's share of the budget comes out of the update's: together they cost what z alone costs.
                share = z**-2 - (2 * count_noise) ** -2
                require(
                    share > 0,
                    f"adaptive clip: count_noise is {count_noise:.4g}, too little for a noise multiplier of {z:.4g}; "
                    f"it must be above {z / 2:.4g}.",
                )
                z_update = share**-0.5
            else:
                radius, count_noise, z_update = terms.clip, None, z
            # σ_ξ = dσ²/M with σ² = z²C²/M, as a multiple of C² on the sum.
            scalar = terms.dimension * z * z / terms.cohort if terms.numerator == "paper" else None
            numerator = None if terms.numerator == "naive" else terms.numerator
            return CentralGaussian(radius, z_update, terms.adjacency, numerator, scalar, count_noise)

        return with_noise(terms, make)

    def width(self, dimension: int) -> int:
        return dimension + (self.numerator == "free")

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise) -> Report:
        vector = lift(clipped.vectors, self.clip) if self.numerator == "free" else clipped.vectors
        return Report(vector, within=clipped.within if self.adapts_clip else None)

    def estimate(self, report: Report) -> Tensor:
        return report.vector[:, :-1] if self.numerator == "free" else report.vector

    @property
    def parts(self) -> tuple[Part, ...]:
        return ("within",) if self.adapts_clip else ()

    @property
    def adapts_clip(self) -> bool:
        return self.count_noise is not None

    def collect(self, report: Report) -> Sums:
        rows = clip(report.vector, self.clip).vectors
        squares = row_norms(rows).square().sum() if self.numerator == "paper" else None
        return make_sums(total(rows), squares, report.within, len(rows))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        server = torch.zeros(1, dtype=torch.int64)
        sigma = self.noise_multiplier * self.clip
        drawn = noise.normal(server, len(sums.vector), sums.vector.device, torch.float64)[0]
        mean = (sums.vector + sigma * drawn) / denominator
        xi, count = (float(v) for v in scalar_noise.normal(server, 2, torch.device("cpu"), torch.float64)[0])
        within = None
        if self.count_noise is not None:
            # Centred, Σ(b_i − ½) + ½·(public cohort), so that one client more or less moves it by only a half.
            centred = float(sums.within) - 0.5 * sums.count
            within = 0.5 + (centred + self.count_noise * count) / denominator
        if self.numerator == "free":
            return Release(mean[:-1], float(mean[-1]), within, self.clip)
        statistic = None
        if self.numerator == "paper" and self.scalar_multiplier is not None:
            statistic = (float(sums.squares) + self.scalar_multiplier * self.clip**2 * xi) / denominator
        return Release(mean, statistic, within, self.clip)

    def noise_variance(self, denominator: float, count: float) -> float:
        return (self.noise_multiplier * self.clip / denominator) ** 2

    def event(self, sampling: Sampling) -> GaussianEvent:
        return central_gaussian(
            self.noise_multiplier,
            self.adjacency,
            sampling,
            scalar_multiplier=self.scalar_multiplier if self.numerator == "paper" else None,
            count_noise=self.count_noise,
        )

    def secure(self, strict: bool = False) -> SecureCentralGaussian:
        return SecureCentralGaussian(**self.settings(), strict=strict)


@dataclass(frozen=True)
class SecureCentralGaussian(CentralGaussian):
    """`CentralGaussian` with integer sums and noise on the same lattice.

    Formal guarantee: rows are clipped and then truncated toward zero, so the sensitivities are those of `CentralGaussian`, and
    each output is the rounding of its ideal output. With `numerator="paper"` truncation moves the difference of two squared
    norms by less than a step, which is added to the joint μ. In strict mode every query has discrete Gaussian noise, charged at
    (1 + 2⁻²⁰)·μ.
    """

    strict: bool = False

    @property
    def noise_kind(self) -> Secure:
        return "strict" if self.strict else True

    @property
    def _step(self) -> float:
        return step_for(self.noise_multiplier * self.clip, self.strict)

    @property
    def _square_noise(self) -> float:
        """The standard deviation on the sum of squared norms, 0 where they are not released."""
        return 0.0 if self.scalar_multiplier is None else self.scalar_multiplier * self.clip**2

    @property
    def _square_step(self) -> float:
        return step_for(self._square_noise, self.strict)

    def collect(self, report: Report) -> Sums:
        check_room(len(report.vector), self.clip, self._step)
        units = truncate(clip(report.vector, self.clip).vectors, self._step)
        squares = None
        if self.numerator == "paper":
            norms = row_norms(units.double() * self._step).clamp_max(self.clip)
            squares = truncate(norms.square(), self._square_step).sum().double() * self._square_step
        return make_sums(units.sum(0).double() * self._step, squares, report.within, len(units))

    def settled(self, sums: Sums) -> Sums:
        """A node's sums truncated to the lattice, where they are already if the node is honest."""
        squares = sums.squares
        if self.scalar_multiplier is not None:
            squares = truncate(squares, self._square_step).double() * self._square_step
        return Sums(truncate(sums.vector, self._step).double() * self._step, squares, sums.within.round(), sums.count)

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        check_room(sums.count, self.clip, self._step)
        deviation = self.noise_multiplier * self.clip
        mean = add_noise(sums.vector[None], self._step, deviation, noise, self.strict)[0] / denominator
        within = statistic = None
        if self.count_noise is not None:
            # Steps are powers of two and far below one half, so halves are on the lattice.
            step = min(0.5, step_for(self.count_noise, self.strict))
            centred = (sums.within - 0.5 * sums.count).reshape(1, 1)
            noisy = add_noise(centred, step, self.count_noise, scalar_noise, self.strict)
            within = 0.5 + float(noisy) / denominator
        if self.numerator == "free":
            return Release(mean[:-1], float(mean[-1]), within, self.clip)
        if self.numerator == "paper":
            check_room(sums.count, self.clip**2, self._square_step)
            squares = sums.squares.reshape(1, 1)
            noisy = add_noise(squares, self._square_step, self._square_noise, scalar_noise, self.strict)
            statistic = float(noisy) / denominator
        return Release(mean, statistic, within, self.clip)

    def event(self, sampling: Sampling) -> GaussianEvent:
        event = replace(super().event(sampling), attained=False)
        if self.numerator == "paper":
            # Left out, a truncated square is still at most C²; only the trade of one square for another can gain by truncation.
            replaced = event.joint_mu if self.adjacency == "replace-one" else event.other_mu
            more = None if replaced is None else replaced + _SQUARE_EXCESS
            event = replace(event, joint_mu=more) if self.adjacency == "replace-one" else replace(event, other_mu=more)
        return event.scaled(1.0 + STRICT_EXCESS) if self.strict else event

    def secure(self, strict: bool = False) -> SecureCentralGaussian:
        return self
