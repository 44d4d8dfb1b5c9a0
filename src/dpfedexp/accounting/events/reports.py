"""Releases that are accounted by the law of their privacy loss: PrivUnit's reports, and anything that is ε-DP by itself."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dpfedexp.accounting.events.gaussian import Adjacency, Family, Sampling
from dpfedexp.accounting.events.loss import ThreePoint, randomised_response
from dpfedexp.arguments import checked
from dpfedexp.errors import require


@checked
@dataclass(frozen=True)
class PrivUnitEvent:
    """One PrivUnit × ScalarDP report of one client.

    The direction V is in the cap of mass `cap` around the client's own direction with probability `p`; the level is (k+1)-ary
    randomised response at `epsilon2`. `nominal` is ε₀+ε₁+ε₂ as asked for; the exact ε of the direction is log(p(1−cap)/(cap(1−p))).
    `sampling` is None in ledgers that do not say who took part. `attained` is False where the report is rounded, which can only
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
        require(self.epsilon >= 0.0, f"epsilon is {self.epsilon}; it must be zero or more.")

    @property
    def exact(self) -> bool:
        """Randomised response may hide less than the release itself does, so its composition is an upper bound."""
        return False

    def losses(self) -> tuple[ThreePoint, ...]:
        return (randomised_response(self.epsilon),) if self.epsilon > 0.0 else ()

    def unsampled(self) -> PureEvent:
        return self

    def hosted(self, clients: int) -> tuple[PureEvent, int]:
        """By group privacy in the centre, by composition where each client reports on its own."""
        if self.setting == "local":
            return self, clients
        return replace(self, epsilon=self.epsilon * clients), 1

    def beside(self, earlier: Iterable[object]) -> PureEvent:
        """Answers that a server adds into one release are charged one by one: ε adds for a group as it does for a sequence."""
        return self

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        return isinstance(other, PureEvent)

    @property
    def strength(self) -> float:
        return self.epsilon

    @property
    def nominal(self) -> None:
        return None
