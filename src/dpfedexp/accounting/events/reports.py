"""Releases that are accounted by the law of their privacy loss: PrivUnit's reports, and anything that is ε-DP by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dpfedexp.accounting.events.gaussian import Adjacency, Family, Sampling
from dpfedexp.errors import checked, require

_LARGEST_EPSILON = 1e6
"""Beyond this a promise is none, and exponentials of it are not numbers."""


@dataclass(frozen=True)
class ThreePoint:
    """A privacy loss that is +step with probability `up`, −step with probability `up`·e^{−step}, and 0 otherwise."""

    step: float
    up: float

    @property
    def down(self) -> float:
        return self.up * math.exp(-self.step)

    @property
    def stay(self) -> float:
        return max(0.0, 1.0 - self.up - self.down)


def randomised_response(epsilon: float) -> ThreePoint:
    """The loss that dominates every release that is ε-DP."""
    return ThreePoint(epsilon, 1.0 / (1.0 + math.exp(-epsilon)))


@checked
@dataclass(frozen=True)
class PrivUnitEvent:
    """One PrivUnit × ScalarDP report of one client.

    The direction V is in the cap of mass `cap` around the client's own direction with probability `p`; the level is (k+1)-ary
    randomised response at `epsilon2`. `nominal` is ε₀+ε₁+ε₂ as asked for; the exact ε of the direction is log(p(1−cap)/(cap(1−p))).
    `sampling` is None in events that do not say who took part. `attained` is False where the report is rounded, which can only
    hide more.
    """

    family: ClassVar[Family] = "report"
    composition: ClassVar[str] = "PrivUnit composition"

    p: float
    cap: float
    epsilon2: float
    k: int
    nominal: float
    setting: Literal["local"] = "local"
    adjacency: Adjacency = "replace-one"
    sampling: Sampling | None = None
    attained: bool = False

    @property
    def exact(self) -> bool:
        """Whether the composition below is the exact one: opposite caps are disjoint, and every client takes part."""
        return self.attained and self.cap <= 0.5 and self.sampling is not None and self.sampling.kind == "full"

    @property
    def direction_epsilon(self) -> float:
        if self.p >= 1.0 or self.cap <= 0.0:
            return math.inf
        return math.log(self.p) + math.log1p(-self.cap) - math.log(self.cap) - math.log1p(-self.p)

    @property
    def epsilon(self) -> float:
        """The exact pure ε of one report."""
        return self.direction_epsilon + self.epsilon2

    def losses(self) -> tuple[ThreePoint, ...]:
        """The independent parts of one report's privacy loss."""
        direction = self.direction_epsilon
        # Caps above one half overlap; randomised response dominates anything that is L-DP.
        first = ThreePoint(direction, self.p) if self.cap <= 0.5 else randomised_response(direction)
        level = ThreePoint(self.epsilon2, 1.0 / (1.0 + self.k * math.exp(-self.epsilon2)))
        return tuple(part for part in (first, level) if part.step > 0.0)

    def unsampled(self) -> PrivUnitEvent:
        return self

    def under(self, adjacency: Adjacency) -> PrivUnitEvent:
        require(
            adjacency == self.adjacency, "a client's own report can only be replaced, so its adjacency is replace-one."
        )
        return self

    def hosted(self, clients: int) -> tuple[PrivUnitEvent, int]:
        """Each client's report is randomised on its own, so they compose."""
        return self, clients

    def beside(self, earlier: Iterable[object]) -> PrivUnitEvent:
        return self

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        """An equal pure ε is not enough: one part that holds all of it composes worse than several. Every part of a report's loss
        must be as small and as rare."""
        if not isinstance(other, PrivUnitEvent):
            return False
        mine, theirs = (
            (e.direction_epsilon, e.p, e.epsilon2, 1.0 / (1.0 + e.k * math.exp(-e.epsilon2))) for e in (self, other)
        )
        return self.cap <= 0.5 and all(part <= most * rounding for part, most in zip(mine, theirs, strict=True))

    @property
    def strength(self) -> float:
        return self.epsilon


@checked
@dataclass(frozen=True)
class PureEvent:
    """A release or a report that is ε-DP by itself, whatever computes it; composed as the randomised response that dominates it.

    `sampling` amplifies nothing here. `attained` says that some pair of neighbours and some outcome reach the ratio e^ε.
    """

    family: ClassVar[Family] = "report"
    composition: ClassVar[str] = "composition of ε-DP releases"

    epsilon: float
    setting: Literal["central", "local"]
    adjacency: Adjacency = "replace-one"
    sampling: Sampling | None = None
    attained: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.epsilon, int | float) and not isinstance(self.epsilon, bool)
        require(number and self.epsilon >= 0.0, f"epsilon is {self.epsilon!r}; it must be a number, zero or more.")
        for name, value, words in (
            ("setting", self.setting, ("central", "local")),
            ("adjacency", self.adjacency, ("replace-one", "add-remove")),
        ):
            require(value in words, f"{name} is {value!r}; it must be {words[0]!r} or {words[1]!r}.")

    @property
    def exact(self) -> bool:
        """Randomised response may hide less than the release itself does, so its composition is an upper bound."""
        return False

    @property
    def strength(self) -> float:
        """The ε that a round spends. In a cohort of fixed size one client more pushes another one out: two contributions change."""
        sampling = self.sampling
        pushes_out = sampling is not None and sampling.kind == "fixed" and sampling.rate < 1.0
        twice = self.setting == "central" and self.adjacency == "add-remove" and pushes_out
        epsilon = float(min(self.epsilon, _LARGEST_EPSILON))
        return 2.0 * epsilon if twice else epsilon

    def losses(self) -> tuple[ThreePoint, ...]:
        return (randomised_response(self.strength),) if self.strength > 0.0 else ()

    def unsampled(self) -> PureEvent:
        return replace(self, sampling=Sampling())

    def under(self, adjacency: Adjacency) -> PureEvent:
        """Replacing a client is leaving one out and taking one in; what leaving one out changes, a replacement does not say."""
        if adjacency == self.adjacency:
            return self
        require(adjacency == "replace-one", "a replace-one epsilon says nothing about leaving a client out.")
        return replace(self, adjacency="replace-one", epsilon=2.0 * self.epsilon)

    def hosted(self, clients: int) -> tuple[PureEvent, int]:
        """By group privacy in the centre, by composition where each client reports on its own."""
        if self.setting == "local":
            return self, clients
        return replace(self, epsilon=self.epsilon * clients), 1

    def beside(self, earlier: Iterable[object]) -> PureEvent:
        """A server may add all of a round's central answers into one release, which then costs the sum of their ε: this answer is
        charged with all of it, because a sequence of the parts would compose to less."""
        if self.setting != "central":
            return self
        before = math.fsum(e.epsilon for e in earlier if isinstance(e, PureEvent) and e.setting == "central")
        return replace(self, epsilon=self.epsilon + before)

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        return isinstance(other, PureEvent)

    @property
    def nominal(self) -> None:
        return None
