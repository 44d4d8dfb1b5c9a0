"""What a round did, in numbers that any accountant can interpret: frozen values, of which the ledger is a list.

Gaussian events compose by their shift in units of the noise. Report events compose by the law of their privacy loss: PrivUnit's is
exact, and `PureEvent` is for any other release that is ε-DP by itself. The third family promises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self, get_args

from dpfedexp.accounting import gdp
from dpfedexp.errors import InputError, checked, require

Adjacency = Literal["replace-one", "add-remove"]
Family = Literal["gaussian", "report", "none"]
ADJACENCIES = ("replace-one", "add-remove")
BesideSum = Literal["unknown", "nothing", "squares", "rounding"]
"""What the released models of a local round depend on beside the sum of its reports: nothing, the reports' squared norms, or a
rounding of every single report. "unknown" is the value of events that do not say."""
NoiseBy = Literal["", "both", "helper"]
"""In a two-party round, who adds noise of the stated size: both aggregators, or only the helper. "" in every other round."""

EVALUATION = "evaluation"
"""The question by which clients measure a released model."""
UPDATE, SQUARES = OWN_QUERIES = ("update", "squared norms")
"""The queries of a mechanism's own; every other query is a vote."""


class _Event:
    """What every event answers, unless sampling or the number of clients changes what it costs."""

    def unsampled(self) -> Self:
        """The same release for an observer who knows who took part."""
        return self

    def for_clients(self, clients: int) -> tuple[Self, int]:
        """What an answer for so many clients of one holder is charged with, and how often."""
        return self, 1

    def beside(self, earlier: Iterable[object]) -> Self:
        """What pays for this answer to a round that the same holder answered before, with `earlier` charged for it."""
        return self

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        """Whether any number of these tells no more than as many of `other`, whose `strength` is at least this one's."""
        return isinstance(other, type(self))


@checked
@dataclass(frozen=True)
class Sampling:
    """Who takes part in a round: everyone, each client independently with probability `rate`, or a fixed number of them.

    `rate` is the public expected fraction of the clients in every case.
    """

    kind: Literal["full", "poisson", "fixed"] = "full"
    rate: float = 1.0

    def __post_init__(self) -> None:
        known, whole = self.kind in ("full", "poisson", "fixed"), self.kind != "full" or self.rate == 1.0
        require(known, f"sampling is {self.kind!r}; it must be 'full', 'poisson' or 'fixed'.")
        require(0.0 < self.rate <= 1.0, f"sampling rate is {self.rate}; it must be above 0 and at most 1.")
        require(whole, f"sampling rate is {self.rate} with full participation; it must be 1.")


@checked
@dataclass(frozen=True)
class Query:
    """One Gaussian query of a joint release.

    Args:
        bound: the largest norm that one client can contribute: what changes when a client is left out.
        sensitivity: the largest change when the data set changes to a neighbour (under the event's adjacency, the others fixed).
        noise: the standard deviation of the noise per coordinate, in the same unit.
        diameter: the largest change when one client is replaced; None where it is not known: then twice the bound is charged.
    """

    name: str
    bound: float
    sensitivity: float
    noise: float
    diameter: float | None = None

    def under(self, adjacency: Adjacency, stated: Adjacency) -> Query:
        """The same query with its sensitivity under `adjacency`, where the present one is that of `stated`."""
        if adjacency == stated:
            return self
        diameter = self.sensitivity if stated == "replace-one" else self.diameter
        replaced = 2.0 * self.bound if diameter is None else diameter
        return replace(self, sensitivity=replaced if adjacency == "replace-one" else self.bound, diameter=replaced)

    @property
    def is_vote(self) -> bool:
        """Whether it sums a number of every client beside the update."""
        return self.name not in OWN_QUERIES

    def scaled(self, factor: float) -> Query:
        """The same query with contributions `factor` times as large."""
        diameter = None if self.diameter is None else self.diameter * factor
        return replace(self, bound=self.bound * factor, sensitivity=self.sensitivity * factor, diameter=diameter)


@checked
@dataclass(frozen=True)
class GaussianEvent(_Event):
    """All the Gaussian queries of one round, released together.

    `joint_mu` is the exact supremum, over neighbours, of the joint shift in units of the noise, where the mechanism can prove that
    it is smaller than the root of the sum of squares (full participation only), and `other_mu` the same under the other adjacency.
    `mu` is what is charged. `attained` says that the noise is Gaussian itself and that some pair of neighbours, under either
    adjacency, moves the release by exactly its supremum. `beside_sum` matters in a local round, `noise_by` in a two-party round,
    whose queries state the noise that one aggregator adds: what the other one can't take away.
    """

    family: ClassVar[Family] = "gaussian"
    nominal: ClassVar[None] = None

    setting: Literal["central", "local", "two-party"]
    adjacency: Adjacency
    queries: tuple[Query, ...]
    sampling: Sampling = Sampling()
    joint_mu: float | None = None
    other_mu: float | None = None
    attained: bool = False
    beside_sum: BesideSum = "unknown"
    noise_by: NoiseBy = ""

    @property
    def exact(self) -> bool:
        """Whether no smaller μ holds: every client takes part, and the shift that is charged can happen."""
        proven = len(self.queries) == 1 or self.joint_mu is not None
        return self.attained and proven and self.sampling.kind == "full"

    @property
    def votes_alone(self) -> bool:
        """Whether no update is released: every query is a vote, whose shares are within ±½."""
        return all(query.is_vote and math.isclose(query.bound, 0.5, rel_tol=1e-5) for query in self.queries)

    def under(self, adjacency: Adjacency) -> GaussianEvent:
        """The same release, accounted under `adjacency`."""
        if adjacency == self.adjacency:
            return self
        queries = tuple(q.under(adjacency, self.adjacency) for q in self.queries)
        return replace(self, adjacency=adjacency, queries=queries, joint_mu=self.other_mu, other_mu=self.joint_mu)

    def scaled(self, factor: float) -> GaussianEvent:
        """The same queries with contributions `factor` times as large."""
        if factor == 1:
            return self
        joint, other = (None if mu is None else mu * factor for mu in (self.joint_mu, self.other_mu))
        return replace(self, queries=tuple(q.scaled(factor) for q in self.queries), joint_mu=joint, other_mu=other)

    def to_readers(self) -> GaussianEvent:
        """A two-party round for an observer who sees the models only: the noise of both, and not who took part."""
        # The sum of two independent Gaussian noises has √2 times the standard deviation of each.
        factor = math.sqrt(0.5) if self.noise_by == "both" else 1.0
        event = replace(self.scaled(factor), setting="central", noise_by="")
        return event if self.sampling.kind == "full" else replace(event, joint_mu=None, other_mu=None)

    def unsampled(self) -> GaussianEvent:
        return replace(self, sampling=Sampling())

    def for_clients(self, clients: int) -> tuple[GaussianEvent, int]:
        # In a sum (central or two-party) all the holder's data together move it `clients` times as far as one client's, in every
        # query (by the triangle inequality the joint shift too), while the noise stays the same. Local: each report has noise of
        # its own, so they compose, which for Gaussian noise is exactly one event with √clients times the shift.
        return self.scaled(math.sqrt(clients) if self.setting == "local" else clients), 1

    def beside(self, earlier: Iterable[object]) -> GaussianEvent:
        # A server may add all of a round's central answers into one sum with one noise, where their shifts add: μ₁ + μ₂ instead of
        # √(μ₁² + μ₂²). With M charged so far, an answer of μ is therefore charged as √((M + μ)² − M²).
        if self.setting == "local":
            return self
        before = gdp.compose(e.mu for e in earlier if isinstance(e, GaussianEvent) and e.setting == self.setting)
        return self if before == 0 or self.mu == 0 else self.scaled(math.sqrt(1.0 + 2.0 * before / self.mu))

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        return True

    @property
    def strength(self) -> float:
        """A number that orders events of one kind by what they cost."""
        return self.mu

    @property
    def separate_mu(self) -> float:
        """The queries composed one by one: sqrt(Σ (sensitivity/noise)²)."""
        return _norm(q.sensitivity / q.noise if q.noise > 0 else math.inf for q in self.queries)

    @property
    def mu(self) -> float:
        """The Gaussian-DP parameter of the release without amplification."""
        return self.separate_mu if self.joint_mu is None else self.joint_mu

    @property
    def radius(self) -> float:
        """The largest joint norm of one client's contribution in units of the noise: what Poisson sampling needs."""
        return _norm(q.bound / q.noise if q.noise > 0 else math.inf for q in self.queries)


def _norm(ratios: Iterable[float]) -> float:
    return math.sqrt(sum(r * r for r in ratios))


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
class PrivUnitEvent(_Event):
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

    def under(self, adjacency: Adjacency) -> PrivUnitEvent:
        require(
            adjacency == self.adjacency, "a client's own report can only be replaced, so its adjacency is replace-one."
        )
        return self

    def for_clients(self, clients: int) -> tuple[PrivUnitEvent, int]:
        return self, clients  # each client's report is randomised on its own, so they compose

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        if not isinstance(other, PrivUnitEvent):
            return False
        # An equal pure ε is not enough: one part that holds all of it composes worse than several.
        mine, theirs = (
            (e.direction_epsilon, e.p, e.epsilon2, 1.0 / (1.0 + e.k * math.exp(-e.epsilon2))) for e in (self, other)
        )
        return self.cap <= 0.5 and all(part <= most * rounding for part, most in zip(mine, theirs, strict=True))

    @property
    def strength(self) -> float:
        return self.epsilon


@checked
@dataclass(frozen=True)
class PureEvent(_Event):
    """A release or a report that is ε-DP by itself, whatever computes it; composed as the randomised response that dominates it.

    `sampling` amplifies nothing here. `attained` says that some pair of neighbours and some outcome reach the ratio e^ε.
    """

    family: ClassVar[Family] = "report"
    composition: ClassVar[str] = "composition of ε-DP releases"
    nominal: ClassVar[None] = None
    exact: ClassVar[bool] = False
    """Randomised response may hide less than the release itself does, so its composition is an upper bound."""

    epsilon: float
    setting: Literal["central", "local"]
    adjacency: Adjacency = "replace-one"
    sampling: Sampling | None = None
    attained: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.epsilon, int | float) and not isinstance(self.epsilon, bool)
        require(number and self.epsilon >= 0.0, f"epsilon is {self.epsilon!r}; it must be a number, zero or more.")
        for name, words in (("setting", ("central", "local")), ("adjacency", ADJACENCIES)):
            value = getattr(self, name)
            require(value in words, f"{name} is {value!r}; it must be {words[0]!r} or {words[1]!r}.")

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
        """Replacing a client is leaving one out and taking one in; the other way round nothing is known."""
        if adjacency == self.adjacency:
            return self
        require(adjacency == "replace-one", "a replace-one epsilon says nothing about leaving a client out.")
        return replace(self, adjacency="replace-one", epsilon=2.0 * self.epsilon)

    def for_clients(self, clients: int) -> tuple[PureEvent, int]:
        """By group privacy in the centre, by composition where each client reports on its own."""
        if self.setting == "local":
            return self, clients
        return replace(self, epsilon=self.epsilon * clients), 1

    def beside(self, earlier: Iterable[object]) -> PureEvent:
        if self.setting != "central":
            return self
        # A server may add all of a round's central answers into one release, which then costs the sum of their ε: this answer is
        # charged with all of it, because a sequence of the parts would compose to less.
        before = math.fsum(e.epsilon for e in earlier if isinstance(e, PureEvent) and e.setting == "central")
        return replace(self, epsilon=self.epsilon + before)


@checked
@dataclass(frozen=True)
class NonPrivateEvent(_Event):
    """A round that promises nothing."""

    family: ClassVar[Family] = "none"
    nominal: ClassVar[None] = None
    sampling: ClassVar[None] = None
    strength: ClassVar[float] = math.inf

    setting: Literal["none"] = "none"
    adjacency: Adjacency = "replace-one"

    def under(self, adjacency: Adjacency) -> NonPrivateEvent:
        return self


ReportEvent = PrivUnitEvent | PureEvent
Event = GaussianEvent | ReportEvent | NonPrivateEvent
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def to_json(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, **asdict(event)}


def from_json(data: dict[str, Any]) -> Event:
    """The event that `to_json` wrote; a clear error for anything else."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(f"event kind is {kind!r}; it must be one of {', '.join(_KINDS)}.")
    try:
        if kind == "GaussianEvent":
            fields["queries"] = tuple(Query(**q) for q in fields["queries"])
        if kind == "GaussianEvent" or fields.get("sampling") is not None:
            fields["sampling"] = Sampling(**fields["sampling"])
        event = _KINDS[kind](**fields)
        # The fields that a ledger may leave out must be of the right type; the accountants use all the others.
        attained = getattr(event, "attained", False)
        require(type(attained) is bool, f"attained is {attained!r}; it must be true or false.")
        if isinstance(event, GaussianEvent):
            words, told = get_args(BesideSum), event.beside_sum
            require(told in words, f"beside_sum is {told!r}; it must be one of {', '.join(words)}.")
            numbers = {"other_mu": event.other_mu, **{f"diameter of {q.name}": q.diameter for q in event.queries}}
            for name, value in numbers.items():
                right = value is None or (type(value) in (int, float) and value >= 0.0)
                require(right, f"{name} is {value!r}; it must be a number, zero or more.")
        return event
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"an event of kind {kind!r} has wrong fields: {error}.") from None
