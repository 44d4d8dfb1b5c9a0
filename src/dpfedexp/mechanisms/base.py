"""The base class of mechanisms: the client's side, the server's side, and the event that the accountant charges.

Other packages call these methods and never check the class of a mechanism. To add a mechanism, write a frozen dataclass that
extends `Mechanism` in its own file, and add a line to `registry.py`.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from dpfedexp.accounting import calibrate_noise, compose
from dpfedexp.accounting.events import Event, NonPrivateEvent, RoundSettings, Sampling
from dpfedexp.core.clipping import BLOCK, AdaptiveClip, Clipped, clip, row_norms
from dpfedexp.core.noise import Noise
from dpfedexp.core.sums import MAX_SHARE, WITHIN_CLIP, Sums, Vote, VoteSpec, check_votes, estimate, shares, sum_shares
from dpfedexp.core.sums import Release as Release
from dpfedexp.core.sums import Secure as Secure
from dpfedexp.errors import InputError, checked, require
from dpfedexp.machine import has_triton, run_on_threads

Numerator = Literal["free", "paper", "naive"]
Part = Literal["level", "votes"]
"""The parts of a report beside its vector."""
OneTimeEvents = Callable[["Mechanism"], Sequence[Event]]
"""A function from a mechanism to the events that the run releases once, beside its rounds."""


@checked
@dataclass(frozen=True)
class Report:
    """The reports of a chunk of clients, one row per client.

    Args:
        vector: the updates, with the coordinate of the free rule if it is used, or PrivUnit's unit vectors V.
        level: PrivUnit's randomized levels Ĵ, else None.
        votes: the clients' shares of the votes, each within ±½, [n, k]; None without votes.
    """

    vector: Tensor
    level: Tensor | None = None
    votes: Tensor | None = None

    def first(self, count: int) -> Report:
        """Return the reports of the first `count` clients; the rows after them are padding."""
        level, votes = (None if part is None else part[:count] for part in (self.level, self.votes))
        return Report(self.vector[:count], level, votes)


def total(rows: Tensor) -> Tensor:
    """Sum the rows in double precision."""
    if rows.is_cuda and has_triton():
        from dpfedexp.core import double_sums

        if double_sums.is_supported(rows):
            return double_sums.column_sums(rows)
    if rows.shape[1] <= BLOCK or rows.device.type != "cpu" or len(rows) == 0:
        return rows.sum(0, dtype=torch.float64)
    out = torch.empty(rows.shape[1], dtype=torch.float64)

    def add(first: int) -> None:
        part, block = (x[..., first : first + BLOCK] for x in (out, rows))
        part.copy_(block[0])
        for row in block[1:]:
            part.add_(row)

    run_on_threads(add, range(0, len(out), BLOCK), torch.get_num_threads())
    return out


def make_sums(vector: Tensor, squares: Tensor | None, votes: Tensor | None, count: int) -> Sums:
    """Return the sums of a chunk, with zeros for quantities that the mechanism does not use."""
    nothing = torch.zeros(0, dtype=torch.float64, device=vector.device)
    squares = nothing.new_zeros(()) if squares is None else squares
    return Sums(vector, squares, nothing if votes is None else votes.to(vector.device), count)


@checked
@dataclass(frozen=True, kw_only=True)
class MechanismSpec(RoundSettings):
    """The settings of a round and the public facts of a run, from which a mechanism is built.

    Args:
        clip: the radius C, or the settings of an adaptive clip.
        numerator: how the numerator of FedEXP's step size is released: "free", "paper" (`core.step_size`) or another; None
            if the step size needs none.
        target_epsilon: the largest ε of `rounds` rounds together at `delta`; None if the noise is given.
        delta: δ of the target.
        dimension: number of parameters of the model.
        cohort: the public number of clients by which sums are divided.
        rounds: the number of rounds that the target is for.
        secure: False for floating-point noise, True for noise rounded to a grid, "strict" for exact discrete noise.
        votes: the votes that every client sends beside its update, without the vote of an adaptive clip.
        one_time: function that returns, for a mechanism, the events outside the rounds that the target covers too, such
            as the vote on the local rate. None for none.
    """

    clip: float | AdaptiveClip
    numerator: Numerator | None = None
    target_epsilon: float | None = None
    delta: float = 1e-5
    dimension: int = 1
    cohort: float = 1.0
    rounds: int = 1
    secure: Secure = False
    votes: tuple[VoteSpec, ...] = ()
    one_time: OneTimeEvents | None = None

    @property
    def radius(self) -> float:
        """The clip, for mechanisms that do not support an adaptive clip."""
        if isinstance(self.clip, AdaptiveClip):
            raise InputError(NOT_ADAPTIVE)
        return self.clip

    def drawn(self, mechanism: Mechanism) -> Mechanism:
        """Return the mechanism with the kind of noise that `secure` asks for."""
        return mechanism.secure(strict=self.secure == "strict") if self.secure else mechanism


NOT_ADAPTIVE = "clip is 'adaptive', which needs mechanism 'central-gaussian': a trusted server releases its count."


class Mechanism(ABC):
    """A privacy mechanism: one object has the client's side, the server's side and the event, so that noise and accounting agree.

    A subclass is a frozen dataclass. It must set `is_local`: a local round is charged before its reports are sent, a central round
    before its release, so a wrong value would charge too late.
    """

    kind: ClassVar[str]
    """The name of the mechanism in the registry."""
    is_local: ClassVar[bool]
    """Whether the report of a client is the release, so that the server need not be trusted."""
    needs_helper: ClassVar[bool] = False
    """Whether the server and a second aggregator compute the sum together; a client then sends an unmasked report to neither."""
    is_private: ClassVar[bool] = True
    """Whether the mechanism guarantees any privacy."""
    numerators: ClassVar[tuple[Numerator, ...]] = ()
    """The statistics for step-size rules that the mechanism can release."""

    clip: float

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        missing = [name for name in ("kind", "is_local") if getattr(cls, name, None) is None]
        if missing and not inspect.isabstract(cls):
            raise TypeError(f"the mechanism {cls.__name__} does not say {' and '.join(missing)}; both must be set.")

    @classmethod
    @abstractmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        """Build the mechanism of the first round and bind it to `spec`: all its constants are set.

        Formal guarantee: with `spec.target_epsilon`, `spec.rounds` rounds of this mechanism, including the cost of
        secure noise, stay within the target.
        """

    @classmethod
    def check_spec(cls, spec: MechanismSpec) -> None:
        """Raise `InputError` for settings that the mechanism does not support, before model and federation are known."""
        require(not isinstance(spec.clip, AdaptiveClip), NOT_ADAPTIVE)
        require(
            not cls.is_local or spec.adjacency == "replace-one",
            "adjacency is 'add-remove' in a local setting: a client that reports at all can only be replaced; use 'replace-one'.",
        )
        require(
            not spec.votes,
            "votes are asked for in a local setting: one number of one client would need noise of its own that is larger than the "
            "number, and would cost as much as the update; use mechanism 'central-gaussian', or choose from public numbers."
            if cls.is_local
            else f"votes are asked for, which mechanism {cls.kind!r} does not release.",
        )
        cls.check_numerator(spec)

    @classmethod
    def check_numerator(cls, spec: MechanismSpec) -> None:
        """Raise `InputError` if the step-size rule needs a statistic that the mechanism does not release."""
        require(
            spec.numerator is None or spec.numerator in cls.numerators,
            f"numerator is {spec.numerator!r}, which mechanism {cls.kind!r} does not release; "
            f"it releases {', '.join(cls.numerators) or 'none'}.",
        )

    @classmethod
    def round_event(cls, settings: RoundSettings) -> Event:
        """Return the event of one round from its settings alone (`dpfedexp privacy`)."""
        spec = MechanismSpec(**{**vars(settings), "clip": 1.0, "dimension": settings.dimension or 8})
        cls.check_spec(spec)
        event = cls.bound(spec).event(settings.sampling)
        if settings.dimension is None:
            other = cls.bound(replace(spec, dimension=16)).event(settings.sampling)
            require(event == other, f"dimension is missing; what a round of {cls.kind!r} costs depends on it.")
        return event

    def width(self, dimension: int) -> int:
        """Return the length of `Sums.vector` for a model with `dimension` parameters."""
        return dimension

    @abstractmethod
    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        """Compute the reports from the clipped updates (the client's side).

        Args:
            clipped: the clipped updates, and which of them were within the clip before.
            clients: the numbers of the clients, which key the random draws.
            noise: the source of random draws.
            ballots: the values of all `votes` but "within clip", in the same order and in their own ranges, [n, k'];
                they are scaled to shares within ±½.
        """

    def estimate(self, report: Report) -> Tensor:
        """Return the estimates of the clients' own updates from their reports, [n, d]."""
        return report.vector

    def check_model(self, dimension: int) -> None:
        """Raise `InputError` if the mechanism was built for a model of another size."""
        return

    @abstractmethod
    def collect(self, report: Report) -> Sums:
        """Sum the reports of a chunk (the server's side); enforces the bounds of the guarantee again."""

    @abstractmethod
    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        """Turn sums into a release with noise. `denominator` is public; the two noises are independent streams."""

    def noise_variance(self, denominator: float, count: float) -> float | None:
        """Return the variance of the noise in each coordinate of `Release.c_bar`, from public numbers alone.

        Formal guarantee: the variance does not depend on clients' data, so it is public. It is that of the ideal noise; the
        variance of secure noise on the lattice is larger by less than one part in 10¹². None if it depends on the clients'
        data, or if there is no formula.

        Args:
            denominator: the public number by which a central sum is divided.
            count: the number, or expected number, of reports in a local mean.
        """
        return None

    def noise_norm(self, dimension: int, denominator: float, count: float) -> float | None:
        """Return the root mean square norm of the noise in `Release.c_bar` for updates of norm C; as public as the variance."""
        variance = self.noise_variance(denominator, count)
        return None if variance is None else math.sqrt(dimension * variance)

    def noise_share(self, dimension: int, cohort: float) -> float | None:
        """Return the norm of the noise over the clip: n = z√d/M in central privacy with M = `cohort`, the same for every clip."""
        norm = self.noise_norm(dimension, cohort, cohort)
        return None if norm is None else norm / self.clip

    @property
    def votes(self) -> tuple[Vote, ...]:
        """The votes that every client sends beside the update; the vote of an adaptive clip comes first."""
        return ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts of a report beside its vector."""
        return ("votes",) if self.votes else ()

    def check_report(self, report: Report) -> None:
        """Raise `InputError` for a report that no honest client sends: in local privacy the server can't clip without bias."""
        return

    def norm_bound(self, width: int) -> float:
        """Return the largest norm of one client's vector in the sums, honest noise included."""
        return self.clip

    def square_bounds(self, width: int) -> tuple[float, float]:
        """Return the lower and the upper bound on one client's share of `Sums.squares`."""
        return 0.0, self.norm_bound(width) ** 2

    def prepare_sums(self, sums: Sums) -> Sums:
        """Prepare sums that were added on another machine for `release`."""
        return sums

    def asking(self, question: str, noise: float) -> Mechanism:
        """Return the mechanism for a question instead of an update, with `noise` as standard deviation on the sum of each bin.

        A client answers with a vector that is ½ in the bin of its choice and 0 elsewhere; the answer is clipped to norm ½.
        """
        raise InputError(
            f"mechanism {self.kind!r} can't ask clients for {question!r}: its noise is not Gaussian. Pass the local rate as a "
            "number, such as lr=0.1, and evaluate on the server's own data."
        )

    @abstractmethod
    def event(self, sampling: Sampling) -> Event:
        """Return the event of one round, which is charged."""

    def client_event(self) -> Event:
        """Return the event for a client that answers a round: it knows that it was asked (no sampling), under replace-one."""
        return self.event(Sampling()).unsampled().under("replace-one")

    def secure(self, strict: bool = False) -> Mechanism:
        """Return the mechanism with noise on a lattice, so that low bits reveal nothing; fields and adjacency stay the same.

        Formal guarantee: the same as without `secure`; `event` includes the cost of the lattice, if any. `strict` uses exact
        discrete Gaussian noise, which does not depend on the quality of floating-point sampling and is far slower.
        """
        raise InputError(f"secure is set, but the mechanism {self.kind!r} has no secure variant; use secure = false.")

    def log_ratio(self, seen: Any, here: Tensor, there: Tensor) -> Any:
        """Return the log-likelihood ratio of each report under two updates, for the audit; None if there is no formula.

        Args:
            seen: reports as float64 rows: the vector, then the level if there is one.
            here: the update under the first hypothesis, [1, d].
            there: the neighboring update, [1, d].
        """
        return None

    def counts_are_public(self, sampling: Sampling) -> bool:
        """Return whether the number of clients in a round may be shown: not if the guarantee hides who took part."""
        if self.is_local or not self.is_private:
            return True
        return sampling.kind == "full" and self.event(sampling).adjacency == "replace-one"

    @property
    def noise_kind(self) -> Secure:
        """False for floating-point noise, True for noise rounded to a grid, "strict" for exact discrete noise."""
        return False

    def vote_noise(self, name: str) -> float:
        """Return the standard deviation of the noise in a vote's released sum, in clients; 0 if there is no such vote."""
        return next((vote.noise for vote in self.votes if vote.name == name), 0.0)

    @property
    def adapts_clip(self) -> bool:
        """Whether the clip changes from round to round, by a vote that the mechanism releases."""
        return any(vote.name == WITHIN_CLIP for vote in self.votes)

    def at_radius(self, radius: float) -> Self:
        """Return the mechanism with the clip `radius`, which adaptive clipping changes between rounds."""
        return self if radius == self.clip else replace(self, clip=radius)  # type: ignore[type-var]

    def settings(self) -> dict[str, Any]:
        """Return the fields of the mechanism, from which its secure variant is made."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@checked
@dataclass(frozen=True)
class NoPrivacy(Mechanism):
    """No privacy: updates and votes are sent without noise. Guarantee: none; event: `NonPrivateEvent`."""

    kind = "none"
    is_local = False
    is_private = False

    clip: float = math.inf
    votes: tuple[Vote, ...] = ()
    question: str = ""

    @classmethod
    def check_spec(cls, spec: MechanismSpec) -> None:
        check_votes(spec.votes)

    @classmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        votes = tuple(Vote(ask.name, ask.low, ask.high, noise=0.0) for ask in spec.votes)
        return spec.drawn(NoPrivacy(math.inf if isinstance(spec.clip, AdaptiveClip) else spec.clip, votes))

    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        return Report(clipped.vectors, votes=shares(self.votes, clipped.within, ballots))

    def collect(self, report: Report) -> Sums:
        squares = row_norms(report.vector).square().sum()
        return make_sums(total(report.vector), squares, sum_shares(report.votes, self.votes), len(report.vector))

    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        count = max(sums.count, 1)
        votes = {v.name: estimate(share, count, v) for v, share in zip(self.votes, sums.votes.tolist(), strict=True)}
        return Release(sums.vector / count, float(sums.squares) / count, votes, self.clip, variance=0.0)

    def noise_variance(self, denominator: float, count: float) -> float:
        return 0.0

    def asking(self, question: str, noise: float) -> Mechanism:
        return NoPrivacy(MAX_SHARE, question=question)

    def event(self, sampling: Sampling) -> NonPrivateEvent:
        return NonPrivateEvent(question=self.question)

    def secure(self, strict: bool = False) -> Mechanism:
        raise InputError("secure is set, but the algorithm is not private: it adds no noise that could be secure.")


def with_secure_noise(mechanism: Mechanism) -> Mechanism:
    """Return the mechanism with noise on the grid, so that the low bits of a release reveal nothing.

    Formal guarantee: the result never has plain noise. Raises `InputError` if `secure` returns a mechanism whose noise is still
    plain.
    """
    if not mechanism.is_private:
        return mechanism
    secure = mechanism.secure()
    require(
        bool(secure.noise_kind),
        f"the mechanism {mechanism.kind!r} draws plain noise where a deployment asked for secure noise; its secure() must return "
        "a variant whose noise_kind is True or 'strict'.",
    )
    return secure


class OnGrid(Mechanism):
    """Base class of the variants with secure noise; those with Gaussian noise have the field `strict`."""

    strict: bool = False

    @property
    def noise_kind(self) -> Secure:
        return "strict" if self.strict else True

    def secure(self, strict: bool = False) -> Self:
        return self


class Gaussian(Mechanism):
    """Base class of Gaussian mechanisms: calibration of z, and the free rule's numerator as one more coordinate of the update."""

    numerator: Numerator | None

    @staticmethod
    def check_noise(spec: MechanismSpec) -> None:
        """Raise `InputError` unless exactly one of noise multiplier and target is given."""
        z = spec.noise_multiplier
        require(
            (z is None) != (spec.target_epsilon is None),
            f"noise_multiplier is {z} and target_epsilon is {spec.target_epsilon}; pass exactly one of them.",
        )
        require(z is None or 0 < z < math.inf, f"noise_multiplier is {z}; it must be a positive number.")

    @staticmethod
    def with_noise(spec: MechanismSpec, make: Callable[[float], Mechanism]) -> Mechanism:
        """Return `make(z)` with the given z, or with the smallest z that meets the target, with the kind of noise of `spec`."""
        target, most = spec.target_epsilon, math.inf
        if spec.noise_multiplier is not None:
            return spec.drawn(make(spec.noise_multiplier))
        if target is None:
            raise InputError("noise_multiplier and target_epsilon are missing; pass exactly one of them.")

        def drawn(z: float) -> Mechanism:
            return spec.drawn(make(min(z, most)))

        def event(z: float) -> Event:
            return drawn(z).event(spec.sampling)

        def once(z: float) -> Sequence[Event]:
            return () if spec.one_time is None else spec.one_time(drawn(z))

        if isinstance(spec.clip, AdaptiveClip) and spec.clip.count_noise is not None:
            # For z ≥ 2·count_noise the count alone would cost more than z; the other votes cost less than 2% of the share of z.
            most = 2.0 * spec.clip.count_noise * (0.99 if spec.votes else 1.0 - 1e-6)
            require(
                compose([(event(most), spec.rounds)], spec.delta).epsilon < target,
                f"adaptive clip: count_noise is {spec.clip.count_noise:.4g}, and the count alone costs more than the "
                f"target_epsilon of {target:g} over {spec.rounds} rounds; raise it, or leave it out.",
            )
        return drawn(calibrate_noise(event, target_epsilon=target, delta=spec.delta, rounds=spec.rounds, one_time=once))

    def width(self, dimension: int) -> int:
        return dimension + (self.numerator == "free")

    def estimate(self, report: Report) -> Tensor:
        return report.vector[:, :-1] if self.numerator == "free" else report.vector

    def _rows(self, clipped: Clipped) -> Tensor:
        """Return the updates; with the free rule they have one more coordinate, which carries ‖Δ‖² (`lift`)."""
        return lift(clipped.vectors, self.clip) if self.numerator == "free" else clipped.vectors

    def _released(
        self, mean: Tensor, statistic: float | None, votes: dict[str, float], variance: float, sigma: float = 0.0
    ) -> Release:
        if self.numerator == "free":
            mean, statistic = mean[:-1], float(mean[-1])
        return Release(mean, statistic, votes, self.clip, sigma, variance)


def lift(delta: Tensor, radius: float) -> Tensor:
    """Append a coordinate that carries ‖Δ‖² to each update, inside the same ball, so that the step size costs no ε.

    With x = ‖Δ‖/C, the vector u = (Δ, (C² − ‖Δ‖²)/C) has ‖u‖²/C² = x² + (1 − x²)² ≤ 1. Any mechanism that is private for vectors of
    norm at most C therefore releases u at the same cost as Δ, and C² − C·(last coordinate of the mean) is an unbiased estimate of
    the mean ‖Δ_i‖². The principle for second moments is related to Kalinin, Upadhyay and Lampert, arXiv:2502.06597.

    Returns u for each row of Δ, clipped once more so that rounding can't push ‖u‖ over C.
    """
    norms = row_norms(delta).cpu()
    last = ((radius * radius - norms.square()).clamp_min(0.0) / radius).to(delta.dtype)
    lifted = torch.cat([delta, last.to(delta.device)[:, None]], dim=1)
    # Not torch.hypot: its last bit depends on the position of a number in the tensor.
    longer = (norms.square() + last.double().square()).sqrt()
    return clip(lifted, radius, reuse=True, norms=longer).vectors
