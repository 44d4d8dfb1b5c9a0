"""Gaussian noise on a sum that two aggregators compute together, so that neither has to be trusted with an update.

A client's row lies on the lattice of secure noise and is split into a masked row and a mask (`core/noise.py`): the server adds the
masked rows, the helper the masks, each with noise of full size. See docs/security.md (wire protocol) and docs/trust.md.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from dpfedexp.accounting.events import GaussianEvent, NoiseBy, Sampling, two_party
from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import Noise, add_noise, check_room, masked_sum, truncate
from dpfedexp.core.sums import MAX_SHARE, Sums, clamp_shares, estimate, lattice_step
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.base import Mechanism, MechanismSpec, Release, Report
from dpfedexp.mechanisms.central_gaussian import CentralGaussian, SecureCentralGaussian

Side = Literal["server", "helper"]

_FAR = 64.0
"""A number of standard deviations that noise exceeds with probability below e⁻²⁰⁰⁰, treated as never."""
_ROWS: dict[Side, tuple[int, int]] = {"server": (0, 0), "helper": (1, 1000)}
"""The first row of each party's draws in the noise streams of vector and scalars; the rows of the parties are disjoint."""


@dataclass(frozen=True)
class TwoPartyGaussian(SecureCentralGaussian):
    """`SecureCentralGaussian` by two aggregators, each of which adds noise of standard deviation zC to the whole sum.

    Formal guarantee: each aggregator sees uniform words or random seeds, and the sum with noise that it does not know. So against
    either aggregator the release has noise zC under replace-one adjacency, without amplification by sampling, because it sees the
    cohort; against readers of the models it has noise √2·zC. The guarantee against the server needs an honest helper, and that
    against the helper an honest server. If both collude, they see every update.

    Every client clips its own row and rounds it to the lattice. The privacy of a client does not depend on the clipping of other
    clients; the accuracy of the sum does.
    """

    kind = "two-party"
    needs_helper = True
    sides: ClassVar[tuple[Side, ...]] = ("server", "helper")
    noise_by: ClassVar[NoiseBy] = "both"

    @classmethod
    def check_spec(cls, spec: MechanismSpec) -> None:
        super().check_spec(spec)
        require(
            spec.adjacency == "replace-one",
            "adjacency is 'add-remove' with two-party aggregation: both aggregators see who takes part, so only what a client "
            "holds can be hidden; use 'replace-one'.",
        )

    @classmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        plain = replace(spec, target_epsilon=None, secure=False)

        def make(z: float) -> Mechanism:
            return cls(**CentralGaussian.bound(replace(plain, noise_multiplier=z)).settings())

        mechanism = cls.with_noise(spec, make)
        # With sampling, all clients may be drawn in one round.
        mechanism.check_headroom(math.ceil(spec.cohort / spec.sampling.rate))  # type: ignore[attr-defined]
        return mechanism

    def secure(self, strict: bool = False) -> Self:
        return replace(self, strict=True) if strict else self

    def event(self, sampling: Sampling) -> GaussianEvent:
        return two_party(super().event(Sampling()), sampling, self.noise_by)

    def noise_variance(self, denominator: float, count: float) -> float:
        return len(self.sides) * super().noise_variance(denominator, count)

    def vote_noise(self, name: str) -> float:
        return math.sqrt(len(self.sides)) * super().vote_noise(name)

    def collect(self, report: Report) -> Sums:
        """Compute the sums with masks, as two aggregators do; without noise they equal those of a trusted server bit for bit."""
        check_room(len(report.vector), self.clip, self._step)
        return self.from_units(masked_sum(self.units(report)), len(report.vector))

    def units(self, report: Report) -> Tensor:
        """Return a report as integer rows, [n, w] int64: vector, squared norm (with `numerator="paper"`), votes scaled to ±½."""
        rows = clip(report.vector, self.clip).vectors
        vectors, squares = truncate(rows, self._step), self._squares(rows)
        columns = [vectors] if squares is None else [vectors, squares[:, None]]
        if self.votes:
            if report.votes is None:
                raise InputError("the report holds no votes; it must have a column for each of them.")
            steps = report.votes.new_tensor(
                [lattice_step(vote, self.noise_kind) for vote in self.votes], dtype=torch.float64
            )
            columns.append((clamp_shares(report.votes) / steps).round().to(vectors.device, torch.int64))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)

    def columns(self, dimension: int) -> int:
        """Return the length of a client's row: a vector for `dimension` parameters, and the squared norm and votes if used."""
        return self.width(dimension) + self.scalars

    @property
    def scalars(self) -> int:
        """The number of columns after those of the vector."""
        return (self.numerator == "paper") + len(self.votes)

    def from_units(self, total: Tensor, count: int) -> Sums:
        """Convert the sum of `count` integer rows as made by `units`, [w] int64, back to real numbers."""
        width = len(total) - self.scalars
        _, steps, _ = self._by_column(len(total), total.device)
        values = total.double() * steps
        squares = values[width] if self.numerator == "paper" else values.new_zeros(())
        return Sums(values[:width], squares, values[len(total) - len(self.votes) :], count)

    def noise_units(self, columns: int, side: Side, noise: Noise, scalar_noise: Noise) -> Tensor:
        """Draw the noise that one aggregator adds to the sum of rows, in lattice steps, [w] int64."""
        width = columns - self.scalars
        first, scalar = _ROWS[side]
        _, steps, deviations = self._by_column(columns)

        def drawn(place: int, count: int, source: Noise, row: int) -> Tensor:
            step, deviation = float(steps[place]), float(deviations[place])
            zeros = torch.zeros(1, count, dtype=torch.float64)
            units: Tensor = add_noise(zeros, step, deviation, source, self.strict, row)[0] / step
            return units.to(torch.int64)

        scalars = [drawn(place, 1, scalar_noise, scalar + place - width) for place in range(width, columns)]
        return torch.cat([drawn(0, width, noise, first), *scalars])

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        """Add the noise of both aggregators, or of the helper alone if only it adds noise; for simulations.

        In a deployment each aggregator adds its own noise, and the server calls `decode`.
        """
        total = self._to_units(sums)
        for side in self.sides:
            total = total + self.noise_units(len(total), side, noise, scalar_noise).to(total.device)
        return self.decode(total, sums.count, denominator)

    def decode(self, total: Tensor, count: int, denominator: float) -> Release:
        """Convert the noisy sum of the rows of `count` clients, [w] int64, to the release.

        Raises `InputError` if a number is larger than honest rows and noise can be: then a mask was not removed, because a seed
        is missing or wrong, or the answer of the helper is wrong. A remaining mask goes unnoticed with probability below 2⁻¹⁰
        in each coordinate.
        """
        self.check_headroom(count)
        require(
            bool((total.double().abs() <= self._most(len(total), count).to(total.device)).all()),
            "the unmasked sum is larger than the clients' rows and the noise can be: a mask was not removed. The helper "
            "answered for other clients, or a client's seed is not the one that it masked with.",
        )
        noisy = self.from_units(total, count)
        votes = {
            vote.name: estimate(float(value), denominator, vote)
            for vote, value in zip(self.votes, noisy.votes, strict=True)
        }
        statistic = float(noisy.squares) / denominator if self.numerator == "paper" else None
        return self._released(noisy.vector / denominator, statistic, votes, self.noise_variance(denominator, count))

    def check_headroom(self, count: int) -> None:
        """Raise `InputError` if the sum of `count` rows and the noise could reach 2⁵²."""
        require(
            bool((self._most(self.columns(1), count) < 2.0**52).all()),
            f"the sum of {count} clients and two noises needs more than 52 bits on the lattice of secure noise; use more noise "
            "or fewer clients.",
        )

    def _most(self, columns: int, count: int) -> Tensor:
        """Return the largest possible value of every column: honest rows plus `_FAR` standard deviations of noise."""
        bounds, steps, deviations = self._by_column(columns)
        most: Tensor = (count * bounds + len(self.sides) * _FAR * deviations) / steps
        return most

    def _to_units(self, sums: Sums) -> Tensor:
        parts = [sums.vector.double()]
        if self.numerator == "paper":
            parts.append(sums.squares.double().reshape(1).to(sums.vector.device))
        values = torch.cat([*parts, sums.votes.double().to(sums.vector.device)])
        _, steps, _ = self._by_column(len(values), values.device)
        units: Tensor = values / steps
        require(
            bool((units == units.round()).all()),
            "the sums are not on the lattice of secure noise; all of them must come from a secure mechanism.",
        )
        return units.to(torch.int64)

    def _by_column(self, columns: int, device: torch.device | None = None) -> tuple[Tensor, ...]:
        """Return for every column the bound of one client, the step of the lattice, and the noise of one aggregator, [w] each."""
        own = (self.clip, self._step, self.noise_multiplier * self.clip)
        extra = [(self.clip**2, self._square_step, self._square_noise)] if self.numerator == "paper" else []
        extra += [(MAX_SHARE, lattice_step(vote, self.noise_kind), vote.noise) for vote in self.votes]
        rows = torch.tensor([own, *extra], dtype=torch.float64, device=device)
        return torch.cat([rows[:1].expand(columns - len(extra), 3), rows[1:]]).unbind(1)


@dataclass(frozen=True)
class OneSidedGaussian(TwoPartyGaussian):
    """`TwoPartyGaussian` in which only the helper adds noise: as much as in central privacy, but no guarantee against the helper.

    Formal guarantee: against the server and readers of the models the release has noise zC; sampling does not amplify against the
    server, which sees the cohort. Nothing is guaranteed against the helper, which knows its own noise and sees the models.
    """

    kind = "two-party-one-sided"
    sides = ("helper",)
    noise_by = "helper"
