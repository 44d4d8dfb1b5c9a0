"""Gaussian queries that are released together: what they move by, and the noise on them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from dpfedexp.accounting import gdp
from dpfedexp.errors import InputError, checked

Adjacency = Literal["replace-one", "add-remove"]
Family = Literal["gaussian", "report", "none"]
ADJACENCIES = ("replace-one", "add-remove")
BesideSum = Literal["unknown", "nothing", "squares", "rounding"]
"""What the released models of a local round depend on beside the sum of its reports: nothing, the reports' squared norms, or a
rounding of every single report. "unknown" is the value of events that do not say."""
NoiseBy = Literal["", "both", "helper"]
"""In a two-party round, who adds noise of the stated size: both aggregators, or only the helper. "" in every other round."""

UPDATE, SQUARES = OWN_QUERIES = ("update", "squared norms")
"""The queries of a mechanism's own; every other query is a vote."""


@checked
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


@checked
@dataclass(frozen=True)
class Query:
    """One Gaussian query of a joint release.

    Args:
        bound: the largest norm that one client can contribute: what changes when a client is left out.
        sensitivity: the largest change when the data set changes to a neighbour (under the event's adjacency, the
            others fixed).
        noise: the standard deviation of the noise per coordinate, in the same unit.
        diameter: the largest change when one client's contribution is replaced; None where it is not known, and then
            twice the bound is charged for it.
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
class GaussianEvent:
    """All the Gaussian queries of one round, released together.

    `joint_mu` is the exact supremum, over neighbours, of the joint shift in units of the noise, where the mechanism can prove that
    it is smaller than the root of the sum of squares (full participation only), and `other_mu` the same under the other adjacency.
    `mu` is what is charged. `attained` says that the noise is Gaussian itself and that some pair of neighbours, under either
    adjacency, moves the release by exactly its supremum. `beside_sum` matters in a local round, `noise_by` in a two-party round,
    whose queries state the noise that one aggregator adds: what the other one can't take away.
    """

    family: ClassVar[Family] = "gaussian"

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
        """A two-party round for somebody who sees the models only: the noise of both, and not who took part.

        The sum of two independent Gaussian noises has √2 times the standard deviation of each.
        """
        factor = math.sqrt(0.5) if self.noise_by == "both" else 1.0
        whole = self.sampling.kind == "full"
        event = replace(self.scaled(factor), setting="central", noise_by="")
        return event if whole else replace(event, joint_mu=None, other_mu=None)

    def unsampled(self) -> GaussianEvent:
        """The same release for somebody who knows who took part."""
        return replace(self, sampling=Sampling())

    def hosted(self, clients: int) -> tuple[GaussianEvent, int]:
        """What an answer for so many clients of one holder is charged with, and how often.

        In a sum (central or two-party) all the holder's data together move it `clients` times as far as one client's, in every
        query of the round (by the triangle inequality the joint shift too), while the noise stays the same. Local: each client's
        report has noise of its own, so the reports compose, which for Gaussian noise is exactly one event with √clients times the
        shift.
        """
        return self.scaled(math.sqrt(clients) if self.setting == "local" else clients), 1

    def beside(self, earlier: Iterable[object]) -> GaussianEvent:
        """What pays for this answer to a round that the same holder answered before, with `earlier` charged for it.

        A server may add all of a round's central answers into one sum with one noise, where their shifts add: μ₁ + μ₂ instead of
        √(μ₁² + μ₂²). With M charged so far, an answer of μ is therefore charged as √((M + μ)² − M²).
        """
        if self.setting == "local":
            return self
        before = gdp.compose(e.mu for e in earlier if isinstance(e, GaussianEvent) and e.setting == self.setting)
        return self if before == 0 or self.mu == 0 else self.scaled(math.sqrt(1.0 + 2.0 * before / self.mu))

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        """Whether any number of these tells no more than as many of `other`, whose `strength` is at least this one's."""
        return True

    @property
    def strength(self) -> float:
        """A number that orders events of one kind by what they cost."""
        return self.mu

    @property
    def nominal(self) -> None:
        """The ε that was asked for, where it differs from the one that is spent."""
        return None

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
