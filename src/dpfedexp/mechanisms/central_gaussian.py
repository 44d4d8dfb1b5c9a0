"""Gaussian noise that a trusted server adds to the sum, plain and on a lattice: the paper's central setting (z = 5 there)."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from dpfedexp.accounting.events import Adjacency, GaussianEvent, Sampling, central_gaussian, votes_only
from dpfedexp.core import sums as voting
from dpfedexp.core.clipping import AdaptiveClip, Clipped, clip, row_norms
from dpfedexp.core.noise import STRICT_EXCESS, Noise, add_noise, check_room, step_for, truncate, truncated_sum
from dpfedexp.core.sums import MAX_SHARE, WITHIN_CLIP, Sums, Vote
from dpfedexp.errors import InputError, checked, require
from dpfedexp.mechanisms.base import Gaussian, Mechanism, MechanismSpec, OnGrid, Release, Report, make_sums, total

_SQUARE_EXCESS = 2.0**-19
"""Bound on the μ that the lattice adds for squared norms, by truncation and rounding: twice their largest step over noise."""


@checked
@dataclass(frozen=True)
class CentralGaussian(Gaussian):
    """A trusted server adds noise to the sum of updates and divides by a public constant.

    Formal guarantee: `collect` clips every row to norm C (it does not trust the clients' own clipping). One client changes the sum
    by at most 2C (replace-one) or C (add-remove), and the sum gets noise of standard deviation zC, fixed before the round. With
    `numerator="paper"`, Σ‖Δ_i‖² ([0, C²] per client) gets noise `scalar_multiplier`·C². A vote is a sum of shares, clamped by
    `collect` to ±½; one client changes it by at most 1 or ½, and it gets its own noise. With an adaptive clip the first vote is
    "within clip". All are charged as one joint event. With `numerator="free"` the step size costs no ε.

    With a `question` (see `asking`) the vectors are answers instead of updates: each client has ½ in the bin of its choice.
    """

    kind = "central-gaussian"
    is_local = False
    numerators = ("free", "paper")

    clip: float
    noise_multiplier: float
    adjacency: Adjacency = "replace-one"
    numerator: Literal["free", "paper"] | None = None
    scalar_multiplier: float | None = None
    votes: tuple[Vote, ...] = ()
    question: str = ""

    def __post_init__(self) -> None:
        require(
            self.numerator != "paper" or self.scalar_multiplier is not None,
            "the mechanism's scalar_multiplier is missing; numerator 'paper' needs the noise on the squared norms.",
        )
        alone = (self.clip, self.numerator, self.scalar_multiplier, self.votes) == (MAX_SHARE, None, None, ())
        require(
            not self.question or alone, f"the vote {self.question!r} must have clip ½, no numerator and no other votes."
        )
        voting.check_votes(self.votes)
        for vote in self.votes:
            require(vote.noise > 0, f"the vote {vote.name!r} has noise {vote.noise}; it must be a positive number.")

    @classmethod
    def check_spec(cls, spec: MechanismSpec) -> None:
        cls.check_noise(spec)
        cls.check_numerator(spec)
        require(
            all(ask.name != WITHIN_CLIP for ask in spec.votes),
            f"votes has {WITHIN_CLIP!r}, which is the vote of adaptive clipping; use another name.",
        )
        voting.check_votes(spec.votes)

    @classmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        # One-time releases share the one percent of the cost that all votes together may take.
        count = (len(spec.votes) + isinstance(spec.clip, AdaptiveClip)) * (1 if spec.one_time is None else 2)

        def make(z: float) -> CentralGaussian:
            noise = voting.default_noise(spec.cohort, z, count)
            votes = tuple(Vote(ask.name, ask.low, ask.high, noise=noise) for ask in spec.votes)
            radius = spec.clip
            if isinstance(radius, AdaptiveClip):
                votes = (voting.within_clip_vote(radius.count_noise or noise), *votes)
                radius = radius.initial
            # The update gets more noise, so that update and votes together cost as much as an update with z alone.
            share = z**-2 - sum((2 * vote.noise) ** -2 for vote in votes)
            if share <= 0:
                name, noise = min(((vote.name, vote.noise) for vote in votes), key=lambda vote: vote[1])
                named = "adaptive clip: count_noise" if name == WITHIN_CLIP else f"the noise of the vote {name!r}"
                raise InputError(
                    f"{named} is {noise:.4g}, too little for a noise multiplier of {z:.4g}; it must be above {z / 2:.4g}."
                )
            z_update = share**-0.5 if votes else z
            # σ_ξ = dσ²/M with σ² = z²C²/M, as a multiple of C² on the sum.
            scalar = spec.dimension * z * z / spec.cohort if spec.numerator == "paper" else None
            numerator = None if spec.numerator == "naive" else spec.numerator
            return CentralGaussian(radius, z_update, spec.adjacency, numerator, scalar, votes)

        return cls.with_noise(spec, make)

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        return Report(self._rows(clipped), votes=voting.shares(self.votes, clipped.within, ballots))

    def collect(self, report: Report) -> Sums:
        rows = clip(report.vector, self.clip).vectors
        squares = row_norms(rows).square().sum() if self.numerator == "paper" else None
        return make_sums(total(rows), squares, voting.sum_shares(report.votes, self.votes), len(rows))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        server = torch.zeros(1, dtype=torch.int64)
        sigma = self.noise_multiplier * self.clip
        drawn = noise.normal(server, len(sums.vector), sums.vector.device, torch.float64)[0]
        mean = (sums.vector + sigma * drawn) / denominator
        # Always one draw for the squared norms and one for the vote of the clip, also if unused; then the draws of the other votes.
        width = 2 + len(voting.client_votes(self.votes))
        xi, *draws = scalar_noise.normal(server, width, torch.device("cpu"), torch.float64)[0].tolist()
        draws = draws[len(draws) - len(self.votes) :]
        votes = {
            vote.name: voting.estimate(value + vote.noise * draw, denominator, vote)
            for vote, value, draw in zip(self.votes, sums.votes.tolist(), draws, strict=True)
        }
        statistic = None
        if self.numerator == "paper" and self.scalar_multiplier is not None:
            statistic = (float(sums.squares) + self.scalar_multiplier * self.clip**2 * xi) / denominator
        return self._released(mean, statistic, votes, self.noise_variance(denominator, sums.count))

    def noise_variance(self, denominator: float, count: float) -> float:
        return (self.noise_multiplier * self.clip / denominator) ** 2

    def asking(self, question: str, noise: float) -> Mechanism:
        plain: dict[str, Any] = {"numerator": None, "scalar_multiplier": None, "votes": (), "question": question}
        return replace(self, clip=MAX_SHARE, noise_multiplier=noise / MAX_SHARE, **plain)

    def event(self, sampling: Sampling) -> GaussianEvent:
        if self.question:
            return votes_only(((self.question, self.noise_multiplier * self.clip),), self.adjacency, sampling)
        return central_gaussian(
            self.noise_multiplier,
            self.adjacency,
            sampling,
            scalar_multiplier=self.scalar_multiplier if self.numerator == "paper" else None,
            votes=tuple((vote.name, vote.noise) for vote in self.votes),
        )

    def secure(self, strict: bool = False) -> Mechanism:
        return SecureCentralGaussian(**self.settings(), strict=strict)


@dataclass(frozen=True)
class SecureCentralGaussian(OnGrid, CentralGaussian):
    """`CentralGaussian` with integer sums and noise on the same lattice.

    Formal guarantee: rows are clipped and then truncated toward zero, so the sensitivities are those of `CentralGaussian`, and
    each output is the rounding of the ideal output. With `numerator="paper"`, truncation changes the difference of two squared
    norms by less than a step, which is added to the joint μ. Shares of votes are rounded to a lattice that contains ±½, so they
    stay within ±½. In strict mode every query has discrete Gaussian noise, charged at (1 + 2⁻²⁰)·μ.
    """

    strict: bool = False

    @property
    def _step(self) -> float:
        return step_for(self.noise_multiplier * self.clip, self.strict)

    @property
    def _square_noise(self) -> float:
        """The standard deviation of the noise on the sum of squared norms; 0 if they are not released."""
        return 0.0 if self.scalar_multiplier is None else self.scalar_multiplier * self.clip**2

    @property
    def _square_step(self) -> float:
        return step_for(self._square_noise, self.strict)

    def collect(self, report: Report) -> Sums:
        check_room(len(report.vector), self.clip, self._step)
        rows = clip(report.vector, self.clip).vectors
        units = self._squares(rows)
        squares = None if units is None else units.sum().double() * self._square_step
        votes = voting.sum_shares(report.votes, self.votes, self.noise_kind)
        return make_sums(truncated_sum(rows, self._step), squares, votes, len(rows))

    def _squares(self, rows: Tensor) -> Tensor | None:
        """Return the squared norms of clipped rows in steps of their lattice, [n] int64; None if they are not used."""
        if self.numerator != "paper":
            return None
        norms = row_norms(truncate(rows, self._step).double() * self._step).clamp_max(self.clip)
        return truncate(norms.square(), self._square_step)

    def prepare_sums(self, sums: Sums) -> Sums:
        """Truncate the sums of a node to the lattice; the sums of an honest node are on it already."""
        squares = sums.squares
        if self.scalar_multiplier is not None:
            squares = truncate(squares, self._square_step).double() * self._square_step
        votes = voting.on_lattice(sums.votes, self.votes, self.noise_kind)
        return Sums(truncate(sums.vector, self._step).double() * self._step, squares, votes, sums.count)

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        check_room(sums.count, self.clip, self._step)
        deviation = self.noise_multiplier * self.clip
        mean = add_noise(sums.vector[None], self._step, deviation, noise, self.strict)[0] / denominator
        statistic, votes = None, {}
        for place, (vote, value) in enumerate(zip(self.votes, sums.votes, strict=True)):
            step = voting.lattice_step(vote, self.noise_kind)
            check_room(sums.count, MAX_SHARE, step)
            # Each vote uses its own row of the noise stream, because the same row may return the same draws; the clip uses row 0.
            row = place if self.adapts_clip else place + 1
            noisy = add_noise(value.reshape(1, 1), step, vote.noise, scalar_noise, self.strict, row)
            votes[vote.name] = voting.estimate(float(noisy), denominator, vote)
        if self.numerator == "paper":
            check_room(sums.count, self.clip**2, self._square_step)
            squares = sums.squares.reshape(1, 1)
            noisy = add_noise(squares, self._square_step, self._square_noise, scalar_noise, self.strict)
            statistic = float(noisy) / denominator
        return self._released(mean, statistic, votes, self.noise_variance(denominator, sums.count))

    def event(self, sampling: Sampling) -> GaussianEvent:
        event = replace(super().event(sampling), attained=False)
        if self.numerator == "paper":
            # A truncated square is still at most C², so leaving a client out costs no more; only a replacement can cost more.
            field = "joint_mu" if self.adjacency == "replace-one" else "other_mu"
            if (mu := getattr(event, field)) is not None:
                event = replace(event, **{field: mu + _SQUARE_EXCESS})
        return event.scaled(1.0 + STRICT_EXCESS) if self.strict else event
