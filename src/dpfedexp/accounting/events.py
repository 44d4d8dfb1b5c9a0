"""What a round did, in numbers that any accountant can interpret.

An event is a frozen value made by a mechanism from its own fields. Accounting knows mechanisms only by these events; the ledger
is a list of them. The JSON form of an event may gain fields but never change the meaning of one: old ledgers must stay readable.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from dpfedexp.errors import InputError, require

Adjacency = Literal["replace-one", "add-remove"]
ADJACENCIES = ("replace-one", "add-remove")
BesideSum = Literal["unknown", "nothing", "squares", "rounding"]
"""What the released models of a local round depend on beside the sum of its reports: nothing, the reports' squared norms, or a
rounding of every single report. "unknown" is the value of ledgers that do not say."""


@dataclass(frozen=True)
class Sampling:
    """Who takes part in a round: everyone, each client independently with probability `rate`, or a fixed number of them.

    `rate` is the public expected fraction of the clients in every case.
    """

    kind: Literal["full", "poisson", "fixed"] = "full"
    rate: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in ("full", "poisson", "fixed"):
            raise InputError(f"sampling is {self.kind!r}; it must be 'full', 'poisson' or 'fixed'.")
        if not 0.0 < self.rate <= 1.0:
            raise InputError(f"sampling rate is {self.rate}; it must be above 0 and at most 1.")
        if self.kind == "full" and self.rate != 1.0:
            raise InputError(f"sampling rate is {self.rate} with full participation; it must be 1.")


@dataclass(frozen=True)
class Query:
    """One Gaussian query of a joint release.

    bound        the largest norm that one client can contribute: what changes when a client is left out
    sensitivity  the largest change when the data set changes to a neighbour (under the event's adjacency, the others fixed)
    noise        the standard deviation of the noise per coordinate, in the same unit
    diameter     the largest change when one client's contribution is replaced; None where it is not known, and then twice the
                 bound is charged for it
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


@dataclass(frozen=True)
class GaussianEvent:
    """All the Gaussian queries of one round, released together.

    `joint_mu` is the exact supremum, over neighbours, of the joint shift in units of the noise, where the mechanism can prove that
    it is smaller than the root of the sum of squares (full participation only), and `other_mu` the same under the other adjacency.
    `mu` is what is charged. `attained` says that the noise is Gaussian itself and that some pair of neighbours, under either
    adjacency, moves the release by exactly its supremum. `beside_sum` matters in a local round.
    """

    setting: Literal["central", "local"]
    adjacency: Adjacency
    queries: tuple[Query, ...]
    sampling: Sampling = Sampling()
    joint_mu: float | None = None
    other_mu: float | None = None
    attained: bool = False
    beside_sum: BesideSum = "unknown"

    @property
    def exact(self) -> bool:
        """Whether no smaller μ holds: every client takes part, and the shift that is charged can happen."""
        proven = len(self.queries) == 1 or self.joint_mu is not None
        return self.attained and proven and self.sampling.kind == "full"

    def under(self, adjacency: Adjacency) -> GaussianEvent:
        """The same release, accounted under `adjacency`."""
        if adjacency == self.adjacency:
            return self
        queries = tuple(q.under(adjacency, self.adjacency) for q in self.queries)
        return replace(self, adjacency=adjacency, queries=queries, joint_mu=self.other_mu, other_mu=self.joint_mu)

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


@dataclass(frozen=True)
class PrivUnitEvent:
    """One PrivUnit × ScalarDP report of one client.

    The direction V is in the cap of mass `cap` around the client's own direction with probability `p`; the level is (k+1)-ary
    randomised response at `epsilon2`. `nominal` is ε₀+ε₁+ε₂ as asked for; the exact ε of the direction is log(p(1−cap)/(cap(1−p))).
    `sampling` is None in ledgers that do not say who took part. `attained` is False where the report is rounded, which can only
    hide more.
    """

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


@dataclass(frozen=True)
class NonPrivateEvent:
    """A round that promises nothing."""

    setting: Literal["none"] = "none"
    adjacency: Adjacency = "replace-one"


Event = GaussianEvent | PrivUnitEvent | NonPrivateEvent


def to_json(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, **asdict(event)}


def from_json(data: dict[str, Any]) -> Event:
    """The event that `to_json` wrote; a clear error for anything else."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    try:
        match kind:
            case "GaussianEvent":
                fields["queries"] = tuple(Query(**q) for q in fields["queries"])
                fields["sampling"] = Sampling(**fields["sampling"])
                gaussian = GaussianEvent(**fields)
                _check_optional(gaussian)
                return gaussian
            case "PrivUnitEvent":
                if fields.get("sampling") is not None:
                    fields["sampling"] = Sampling(**fields["sampling"])
                report = PrivUnitEvent(**fields)
                _check_optional(report)
                return report
            case "NonPrivateEvent":
                return NonPrivateEvent(**fields)
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"an event of kind {kind!r} has wrong fields: {error}.") from None
    raise InputError(f"event kind is {kind!r}; it must be GaussianEvent, PrivUnitEvent or NonPrivateEvent.")


def _check_optional(event: GaussianEvent | PrivUnitEvent) -> None:
    """Whether the fields that a ledger may leave out are of the right type."""
    require(type(event.attained) is bool, f"attained is {event.attained!r}; it must be true or false.")
    if isinstance(event, GaussianEvent):
        require(
            event.beside_sum in get_args(BesideSum),
            f"beside_sum is {event.beside_sum!r}; it must be one of {', '.join(get_args(BesideSum))}.",
        )
        numbers = {"other_mu": event.other_mu, **{f"diameter of {q.name}": q.diameter for q in event.queries}}
        for name, value in numbers.items():
            right = value is None or (type(value) in (int, float) and value >= 0.0)
            require(right, f"{name} is {value!r}; it must be a number, zero or more.")


def _norm(ratios) -> float:
    return math.sqrt(sum(r * r for r in ratios))
