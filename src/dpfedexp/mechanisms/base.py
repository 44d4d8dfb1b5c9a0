"""What every mechanism owns: a client's side, the server's side, and the event that the accountant charges.

Other rooms ask these methods, and never for a mechanism's class. A new mechanism is a frozen dataclass in a file of its own that
extends `Mechanism`, and a line in `registry.py`.
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
"""What a report may carry beside its vector."""
OneTimeEvents = Callable[["Mechanism"], Sequence[Event]]
"""From a mechanism to the events that the run releases once, besides its rounds."""


@checked
@dataclass(frozen=True)
class Report:
    """What a chunk of clients sends, one row per client.

    Args:
        vector: the update, the update with the free rule's coordinate, or PrivUnit's unit vector V.
        level: PrivUnit's randomized level Ĵ, else None.
        votes: the shares of the mechanism's votes, each within ±½, [n, k]; None where it asks for none.
    """

    vector: Tensor
    level: Tensor | None = None
    votes: Tensor | None = None

    def first(self, count: int) -> Report:
        """The reports of the first clients; rows behind them only filled up a shape."""
        level, votes = (None if part is None else part[:count] for part in (self.level, self.votes))
        return Report(self.vector[:count], level, votes)


def total(rows: Tensor) -> Tensor:
    """Σ of the rows in double precision."""
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
    """Sums of a chunk, with zeros for what the mechanism does not ask for."""
    nothing = torch.zeros(0, dtype=torch.float64, device=vector.device)
    squares = nothing.new_zeros(()) if squares is None else squares
    return Sums(vector, squares, nothing if votes is None else votes.to(vector.device), count)


@checked
@dataclass(frozen=True, kw_only=True)
class MechanismSpec(RoundSettings):
    """What a mechanism is built from: the settings of a round, and public facts about the run.

    Args:
        clip: the radius C, or how it adapts.
        numerator: which statistic the step size needs, None for none.
        target_epsilon: the ε that `rounds` rounds together may cost at `delta`; None where the noise is given.
        delta: δ of the target.
        dimension: parameters of the model.
        cohort: the public number of clients that sums are divided by.
        rounds: how many rounds the target is for.
        secure: False for plain noise, True for noise on the lattice, "strict" for discrete noise.
        votes: what is asked of every client beside its update and, with an adaptive clip, beside its count.
        one_time: events that the run releases once, besides its rounds, and that the target must cover; None for none.
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
        """The clip of a mechanism that does not adapt it."""
        if isinstance(self.clip, AdaptiveClip):
            raise InputError(NOT_ADAPTIVE)
        return self.clip

    def drawn(self, mechanism: Mechanism) -> Mechanism:
        """The mechanism with the kind of noise that is asked for."""
        return mechanism.secure(strict=self.secure == "strict") if self.secure else mechanism


NOT_ADAPTIVE = "clip is 'adaptive', which needs mechanism 'central-gaussian': a trusted server releases its count."


class Mechanism(ABC):
    """One object that owns all three sides of the same promise, so that noise and accounting can't drift apart.

    A subclass is a frozen dataclass. It must say `is_local`: a local round is charged before its reports are sent, a central one
    before its release, so a wrong answer would charge too late.
    """

    kind: ClassVar[str]
    """Its name in the registry."""
    is_local: ClassVar[bool]
    """Whether a client's own report is the release, so that the server need not be trusted."""
    needs_helper: ClassVar[bool] = False
    """Whether a second aggregator makes the sum with the server, so that a client may send neither of them a report."""
    is_private: ClassVar[bool] = True
    """Whether it guarantees any privacy."""
    numerators: ClassVar[tuple[Numerator, ...]] = ()
    """Which statistics it can release for a step-size rule."""

    clip: float

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        missing = [name for name in ("kind", "is_local") if getattr(cls, name, None) is None]
        if missing and not inspect.isabstract(cls):
            raise TypeError(f"the mechanism {cls.__name__} does not say {' and '.join(missing)}; both must be set.")

    @classmethod
    @abstractmethod
    def bound(cls, spec: MechanismSpec) -> Mechanism:
        """The mechanism of the first round, with every constant in place.

        Formal guarantee: `spec.rounds` rounds of this mechanism, including the cost of secure noise, stay within the target.
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
        """What one round costs where only its settings are known (`dpfedexp privacy`)."""
        spec = MechanismSpec(**{**vars(settings), "clip": 1.0, "dimension": settings.dimension or 8})
        cls.check_spec(spec)
        event = cls.bound(spec).event(settings.sampling)
        if settings.dimension is None:
            other = cls.bound(replace(spec, dimension=16)).event(settings.sampling)
            require(event == other, f"dimension is missing; what a round of {cls.kind!r} costs depends on it.")
        return event

    def width(self, dimension: int) -> int:
        """How long `Sums.vector` is for a model of this dimension."""
        return dimension

    @abstractmethod
    def randomize(self, clipped: Clipped, clients: Tensor, noise: Noise, ballots: Tensor | None = None) -> Report:
        """The client's side: from updates inside the ball to what is sent.

        Args:
            clipped: the updates, and which of them were inside the ball before.
            clients: their numbers, which key the draws.
            noise: where draws come from.
            ballots: the values of `votes` other than "within clip", in their order and their own ranges, [n, k']; a client's
                share stays within ±½.
        """

    def estimate(self, report: Report) -> Tensor:
        """A report as an estimate of the client's own update, [n, d]."""
        return report.vector

    def check_model(self, dimension: int) -> None:
        """Raises `InputError` where the mechanism is made for a model of another size."""
        return

    @abstractmethod
    def collect(self, report: Report) -> Sums:
        """The server's side of one chunk; enforces again the bounds that the guarantee depends on."""

    @abstractmethod
    def release(self, sums: Sums, denominator: float, noise: Noise, scalar_noise: Noise) -> Release:
        """From sums to what may be seen, with the noise's variance. `denominator` is public; the noises are independent streams."""

    def noise_variance(self, denominator: float, count: float) -> float | None:
        """The variance that the mechanism's noise has in each coordinate of `Release.c_bar`, from public numbers alone.

        Formal guarantee: it does not depend on clients' data, so it is public. It is the variance of the ideal noise; secure
        noise on the lattice exceeds it by less than one part in 10¹². None where it depends on what the clients hold, or no
        formula is at hand.

        Args:
            denominator: the public number that a central sum is divided by.
            count: how many reports a local mean is taken over, or is expected to be taken over.
        """
        return None

    def noise_norm(self, dimension: int, denominator: float, count: float) -> float | None:
        """The root mean square norm of the noise in `Release.c_bar` for updates as long as the clip; as public as its variance."""
        variance = self.noise_variance(denominator, count)
        return None if variance is None else math.sqrt(dimension * variance)

    def noise_share(self, dimension: int, cohort: float) -> float | None:
        """n = z√d/M in central privacy with M = `cohort`: that norm over the clip, which no adaptive clip changes."""
        norm = self.noise_norm(dimension, cohort, cohort)
        return None if norm is None else norm / self.clip

    @property
    def votes(self) -> tuple[Vote, ...]:
        """What it asks of every client beside the update, the adaptive clip's count first."""
        return ()

    @property
    def parts(self) -> tuple[Part, ...]:
        """What a report carries beside its vector."""
        return ("votes",) if self.votes else ()

    def check_report(self, report: Report) -> None:
        """Raises `InputError` where no honest client sends this: in local privacy a server can't clip without bias."""
        return

    def norm_bound(self, width: int) -> float:
        """The largest norm of one client's vector in the sums, that of honest noise included."""
        return self.clip

    def square_bounds(self, width: int) -> tuple[float, float]:
        """Between which values one client's share of `Sums.squares` lies."""
        return 0.0, self.norm_bound(width) ** 2

    def prepare_sums(self, sums: Sums) -> Sums:
        """Prepare sums that were added on another machine for `release`."""
        return sums

    def asking(self, question: str, noise: float) -> Mechanism:
        """The same mechanism for a question in place of the update, with noise of this standard deviation on each bin's sum.

        A client answers with a vector that has ½ in the bin of its choice and 0 elsewhere; the answer is clipped to norm ½.
        """
        raise InputError(
            f"mechanism {self.kind!r} can't ask clients for {question!r}: its noise is not Gaussian. Pass the local rate as a "
            "number, such as lr=0.1, and evaluate on the server's own data."
        )

    @abstractmethod
    def event(self, sampling: Sampling) -> Event:
        """What one round costs."""

    def client_event(self) -> Event:
        """What one round costs a client that answers it: all of its data may be replaced, and it knows that it was asked."""
        return self.event(Sampling()).unsampled().under("replace-one")

    def secure(self, strict: bool = False) -> Mechanism:
        """The same mechanism with noise on a lattice, which hides nothing in low bits: the same fields and adjacency.

        Formal guarantee: that of this mechanism; what is charged says where the lattice costs anything. `strict` takes exact
        discrete Gaussian noise, which leaves nothing to the quality of floating-point sampling and is far slower.
        """
        raise InputError(f"secure is set, but the mechanism {self.kind!r} has no secure variant; use secure = false.")

    def log_ratio(self, seen: Any, here: Tensor, there: Tensor) -> Any:
        """The log-likelihood ratio of reports between two updates, for the audit; None where no formula is at hand.

        Args:
            seen: reports as float64 rows: the vector, then the level where there is one.
            here: one client's update, [1, d].
            there: its neighbor's.
        """
        return None

    def counts_are_public(self, sampling: Sampling) -> bool:
        """Whether it may be shown how many clients took part: not where the guarantee hides who did."""
        if self.is_local or not self.is_private:
            return True
        return sampling.kind == "full" and self.event(sampling).adjacency == "replace-one"

    @property
    def noise_kind(self) -> Secure:
        """False for plain noise, True for noise on a lattice, "strict" for discrete noise."""
        return False

    @property
    def adapts_clip(self) -> bool:
        """Whether its clip changes from round to round, by a count that it releases."""
        return any(vote.name == WITHIN_CLIP for vote in self.votes)

    def at_radius(self, radius: float) -> Self:
        """The mechanism with the clip that is in force, which adaptive clipping moves."""
        return self if radius == self.clip else replace(self, clip=radius)  # type: ignore[type-var]

    def settings(self) -> dict[str, Any]:
        """Its own fields, which a secure variant is made from."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]


@checked
@dataclass(frozen=True)
class NoPrivacy(Mechanism):
    """Sends the update as it is, and votes without noise. Guarantee: none; event: `NonPrivateEvent`."""

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
    """The mechanism on the grid, so that no low bit of a release tells what it was added to.

    Formal guarantee: plain noise never leaves this function. A mechanism whose `secure` says so and whose noise stays plain is
    refused.
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


class Gaussian(Mechanism):
    """What Gaussian mechanisms share: noise by z or by a target, and a numerator that may be a coordinate behind the update."""

    numerator: Numerator | None

    @staticmethod
    def check_noise(spec: MechanismSpec) -> None:
        """Exactly one of noise multiplier and target."""
        z = spec.noise_multiplier
        require(
            (z is None) != (spec.target_epsilon is None),
            f"noise_multiplier is {z} and target_epsilon is {spec.target_epsilon}; pass exactly one of them.",
        )
        require(z is None or 0 < z < math.inf, f"noise_multiplier is {z}; it must be a positive number.")

    @staticmethod
    def with_noise(spec: MechanismSpec, make: Callable[[float], Mechanism]) -> Mechanism:
        """`make(z)` with the z that is asked for, or the smallest one that meets the target, drawn as the terms say."""
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
            # From z = 2·count_noise on the count alone would cost more than z does, and other votes cost less than 2% of z's share.
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
        """The updates, with the free rule's coordinate where it is asked for."""
        return lift(clipped.vectors, self.clip) if self.numerator == "free" else clipped.vectors

    def _released(
        self, mean: Tensor, statistic: float | None, votes: dict[str, float], variance: float, sigma: float = 0.0
    ) -> Release:
        if self.numerator == "free":
            mean, statistic = mean[:-1], float(mean[-1])
        return Release(mean, statistic, votes, self.clip, sigma, variance)


def lift(delta: Tensor, radius: float) -> Tensor:
    """The step size for free: one more coordinate that carries ‖Δ‖² inside the same ball.

    With x = ‖Δ‖/C, the vector u = (Δ, (C² − ‖Δ‖²)/C) has ‖u‖²/C² = x² + (1 − x²)² ≤ 1. Whatever mechanism is private for vectors of
    norm at most C therefore releases u at the same price as Δ, and C² − C·(last coordinate of the mean) is an unbiased mean of
    ‖Δ_i‖². The principle for second moments is related to Kalinin, Upadhyay and Lampert, arXiv:2502.06597.

    Returns u for each row of Δ, clipped once more so that rounding can't push ‖u‖ over C.
    """
    norms = row_norms(delta).cpu()
    last = ((radius * radius - norms.square()).clamp_min(0.0) / radius).to(delta.dtype)
    lifted = torch.cat([delta, last.to(delta.device)[:, None]], dim=1)
    # Not torch.hypot, whose last bit depends on a number's place among the others.
    longer = (norms.square() + last.double().square()).sqrt()
    return clip(lifted, radius, reuse=True, norms=longer).vectors
