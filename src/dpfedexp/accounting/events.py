"""Events: what a round released, as frozen values that any accountant can read. The ledger is a list of them.

Gaussian events compose by their shift in units of the noise. Report events compose by the distribution of their privacy loss, which
is exact for PrivUnit; `PureEvent` stands for any other release that is ε-DP by itself. `NonPrivateEvent` has no guarantee.

The event of one round follows from the settings of the mechanism alone; mechanisms, command line and the paper's tables use the
functions of this module. Everything is in units of the clip C, so rounds with different adaptive clips are the same event.
PrivUnit's constants are in this module too: the mechanism draws from them and the accountant charges them.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self, get_args

from scipy.special import betaincc, betainccinv, betaln

from dpfedexp.accounting import gdp
from dpfedexp.errors import InputError, checked, require

Adjacency = Literal["replace-one", "add-remove"]
Family = Literal["gaussian", "report", "none"]
ADJACENCIES = ("replace-one", "add-remove")
BeyondSum = Literal["unknown", "nothing", "squares", "rounding"]
"""What the released models of a local round depend on beside the sum of its reports: nothing, the squared norms of the reports, or
the rounding of every single report. "unknown" stands for events that do not say."""
NoiseBy = Literal["", "both", "helper"]
"""The parties that add noise of the stated size in a two-party round: both aggregators, or only the helper. "" in other rounds."""

EVALUATION = "evaluation"
"""The name of the query by which clients measure a released model on their own rows."""
UPDATE, SQUARES = OWN_QUERIES = ("update", "squared norms")
"""The names of the queries that a mechanism itself makes; every other query is a vote."""


class _Event:
    """Default methods of events whose cost does not depend on sampling or the number of clients."""

    def unsampled(self) -> Self:
        """Return the event for an observer who knows the cohort: without amplification by sampling."""
        return self

    def for_clients(self, clients: int) -> tuple[Self, int]:
        """Return the event, and how often it is charged, when one node answers for several of its clients."""
        return self, 1

    def charge_after(self, earlier: Iterable[object]) -> Self:
        """Return the charge for one more answer to a round for which the same node was already charged `earlier`."""
        return self

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        """Whether this event costs at most as much as `other` under composition."""
        return isinstance(other, type(self))


@checked
@dataclass(frozen=True)
class Sampling:
    """How the clients of a round are drawn: all of them, each independently with probability `rate`, or a fixed number of them.

    `rate` is always the public expected fraction of clients in a round.
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
        bound: the largest norm of one client's contribution, which is the change when that client is left out.
        sensitivity: the largest change of the sum between two neighboring data sets, under the adjacency of the event.
        noise: the standard deviation of the noise per coordinate, in the unit of `bound`.
        diameter: the largest change when one client is replaced; if None, twice the bound is charged.
    """

    name: str
    bound: float
    sensitivity: float
    noise: float
    diameter: float | None = None

    def under(self, adjacency: Adjacency, stated: Adjacency) -> Self:
        """Return the query with its sensitivity under `adjacency`; its present sensitivity is the one under `stated`."""
        if adjacency == stated:
            return self
        diameter = self.sensitivity if stated == "replace-one" else self.diameter
        replaced = 2.0 * self.bound if diameter is None else diameter
        return replace(self, sensitivity=replaced if adjacency == "replace-one" else self.bound, diameter=replaced)

    @property
    def is_vote(self) -> bool:
        """Whether the query is a vote: a sum of one number per client, beside the update."""
        return self.name not in OWN_QUERIES

    def scaled(self, factor: float) -> Self:
        """Return the query with contributions `factor` times as large."""
        diameter = None if self.diameter is None else self.diameter * factor
        return replace(self, bound=self.bound * factor, sensitivity=self.sensitivity * factor, diameter=diameter)


@checked
@dataclass(frozen=True)
class GaussianEvent(_Event):
    """All the Gaussian queries of one round, released together.

    `joint_mu` is the exact supremum, over neighbors, of the joint shift of all queries in units of the noise. It is set only with
    full participation, where it is proven to be smaller than the root of the sum of squares. `other_mu` is the same number under
    the other adjacency. `mu` is charged. `attained` says that the noise is exactly Gaussian and that some pair of neighbors, under
    either adjacency, moves the release by exactly the supremum. `beyond_sum` is used in local rounds, `noise_by` in two-party
    rounds. The queries of a two-party round state the noise of one aggregator, which the other aggregator can't subtract.
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
    beyond_sum: BeyondSum = "unknown"
    noise_by: NoiseBy = ""

    @property
    def exact(self) -> bool:
        """Whether μ is tight: every client takes part, and some pair of neighboring inputs has the charged sensitivity."""
        proven = len(self.queries) == 1 or self.joint_mu is not None
        return self.attained and proven and self.sampling.kind == "full"

    @property
    def question(self) -> str:
        """The name of the first query if only votes are released; empty if an update is among the queries."""
        return self.queries[0].name if all(query.is_vote for query in self.queries) else ""

    def under(self, adjacency: Adjacency) -> Self:
        """Return the event of the same release under `adjacency`."""
        if adjacency == self.adjacency:
            return self
        queries = tuple(q.under(adjacency, self.adjacency) for q in self.queries)
        return replace(self, adjacency=adjacency, queries=queries, joint_mu=self.other_mu, other_mu=self.joint_mu)

    def scaled(self, factor: float) -> Self:
        """Return the event with contributions `factor` times as large in every query."""
        joint, other = (None if mu is None else mu * factor for mu in (self.joint_mu, self.other_mu))
        return replace(self, queries=tuple(q.scaled(factor) for q in self.queries), joint_mu=joint, other_mu=other)

    def to_readers(self) -> Self:
        """Return a two-party round for an observer of the models only: with the noise of all parties, and the cohort hidden."""
        # The sum of two independent Gaussian noises has √2 times the standard deviation of each.
        factor = math.sqrt(0.5) if self.noise_by == "both" else 1.0
        event = replace(self.scaled(factor), setting="central", noise_by="")
        return event if self.sampling.kind == "full" else replace(event, joint_mu=None, other_mu=None)

    def unsampled(self) -> Self:
        return replace(self, sampling=Sampling())

    def for_clients(self, clients: int) -> tuple[Self, int]:
        # Central and two-party: replacing all data of the holder moves the sum `clients` times as far as replacing one client, in
        # every query and, by the triangle inequality, jointly, while the noise stays the same. Local: each report has its own
        # noise, so the reports compose, which for Gaussian noise is exactly one event with √clients times the shift.
        return self.scaled(math.sqrt(clients) if self.setting == "local" else clients), 1

    def charge_after(self, earlier: Iterable[object]) -> Self:
        # A server may add all central answers of a round into one sum with one noise, in which the shifts add up: μ₁ + μ₂ instead
        # of √(μ₁² + μ₂²). If μ = M was charged so far, an answer with μ is therefore charged as √((M + μ)² − M²).
        if self.setting == "local":
            return self
        before = gdp.compose(e.mu for e in earlier if isinstance(e, GaussianEvent) and e.setting == self.setting)
        return self if before == 0 or self.mu == 0 else self.scaled(math.sqrt(1.0 + 2.0 * before / self.mu))

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        # Gaussian events are ordered by μ alone, and callers compare `strength`, which is μ, before they ask.
        return True

    @property
    def strength(self) -> float:
        """A number that orders events of one class by their cost."""
        return self.mu

    @property
    def mu(self) -> float:
        """μ of the release (Gaussian DP) without amplification by sampling: `joint_mu`, or that of the queries one by one."""
        if self.joint_mu is not None:
            return self.joint_mu
        return _norm(q.sensitivity / q.noise if q.noise > 0 else math.inf for q in self.queries)

    @property
    def radius(self) -> float:
        """The largest norm of one client's contribution to all queries, in units of the noise; used with Poisson sampling."""
        return _norm(q.bound / q.noise if q.noise > 0 else math.inf for q in self.queries)


def _norm(ratios: Iterable[float]) -> float:
    return math.sqrt(sum(r * r for r in ratios))


_LARGEST_EPSILON = 1e6
"""The largest ε in computations: above it there is no protection, and e^ε overflows."""


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


def randomized_response(epsilon: float) -> ThreePoint:
    """Return the privacy loss of randomized response at ε, which dominates that of every ε-DP release."""
    return ThreePoint(epsilon, 1.0 / (1.0 + math.exp(-epsilon)))


@checked
@dataclass(frozen=True)
class PrivUnitEvent(_Event):
    """One PrivUnit × ScalarDP report of one client.

    The direction V is in the cap of mass `cap` around the client's own direction with probability `p`; the level is (k+1)-ary
    randomized response at `epsilon2`. `nominal` is the requested ε₀+ε₁+ε₂; the direction has exactly ε = log(p(1−cap)/(cap(1−p))).
    `sampling` is None in events that do not say who took part. `attained` is False for rounded reports; rounding can only lower
    the privacy loss.
    """

    question: ClassVar[str] = ""
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
        """Whether the composition of `losses` is exact: opposite caps are disjoint, and every client takes part."""
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
        """Return the independent parts of the privacy loss of one report: of its direction and of its level."""
        direction = self.direction_epsilon
        # Opposite caps of mass above ½ overlap; randomized response dominates every L-DP direction.
        first = ThreePoint(direction, self.p) if self.cap <= 0.5 else randomized_response(direction)
        level = ThreePoint(self.epsilon2, 1.0 / (1.0 + self.k * math.exp(-self.epsilon2)))
        return tuple(part for part in (first, level) if part.step > 0.0)

    def under(self, adjacency: Adjacency) -> Self:
        require(
            adjacency == self.adjacency, "a client's own report can only be replaced, so its adjacency is replace-one."
        )
        return self

    def for_clients(self, clients: int) -> tuple[Self, int]:
        return self, clients  # the reports are randomized independently, so they compose

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        if not isinstance(other, PrivUnitEvent):
            return False
        # An equal pure ε is not enough: over many rounds, one part with all of the ε composes to more than several smaller parts.
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
    """Any release or report that is ε-DP by itself, composed as the randomized response that dominates it.

    `sampling` is recorded but does not amplify. `attained` says that some neighbors and some outcome reach the ratio e^ε.
    """

    question: ClassVar[str] = ""
    family: ClassVar[Family] = "report"
    composition: ClassVar[str] = "composition of ε-DP releases"
    nominal: ClassVar[None] = None
    exact: ClassVar[bool] = False
    """Randomized response may reveal more than the release does, so the composition is an upper bound."""

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
        """The ε of a round; doubled if adding a client to a cohort of fixed size replaces another client (two changes)."""
        sampling = self.sampling
        pushes_out = sampling is not None and sampling.kind == "fixed" and sampling.rate < 1.0
        twice = self.setting == "central" and self.adjacency == "add-remove" and pushes_out
        epsilon = float(min(self.epsilon, _LARGEST_EPSILON))
        return 2.0 * epsilon if twice else epsilon

    def losses(self) -> tuple[ThreePoint, ...]:
        return (randomized_response(self.strength),) if self.strength > 0.0 else ()

    def unsampled(self) -> Self:
        return replace(self, sampling=Sampling())

    def under(self, adjacency: Adjacency) -> Self:
        """Return the event with ε under `adjacency`: replace-one costs twice the add-remove ε; the opposite has no bound."""
        if adjacency == self.adjacency:
            return self
        require(adjacency == "replace-one", "a replace-one epsilon does not bound the removal of a client.")
        return replace(self, adjacency="replace-one", epsilon=2.0 * self.epsilon)

    def for_clients(self, clients: int) -> tuple[Self, int]:
        """Return the charge of a node for several clients: one event with ε times `clients` if central, one event each if local."""
        if self.setting == "local":
            return self, clients
        return replace(self, epsilon=self.epsilon * clients), 1

    def charge_after(self, earlier: Iterable[object]) -> Self:
        if self.setting != "central":
            return self
        # A server may add all central answers of a round into one release, which then costs the sum of their ε. The last answer is
        # charged with the whole sum, because the separate charges would compose to less.
        before = math.fsum(e.epsilon for e in earlier if isinstance(e, PureEvent) and e.setting == "central")
        return replace(self, epsilon=self.epsilon + before)


@checked
@dataclass(frozen=True)
class NonPrivateEvent(_Event):
    """A round without a privacy guarantee."""

    family: ClassVar[Family] = "none"
    nominal: ClassVar[None] = None
    sampling: ClassVar[None] = None
    strength: ClassVar[float] = math.inf

    setting: Literal["none"] = "none"
    adjacency: Adjacency = "replace-one"
    question: str = ""

    def under(self, adjacency: Adjacency) -> Self:
        return self


ReportEvent = PrivUnitEvent | PureEvent
Event = GaussianEvent | ReportEvent | NonPrivateEvent
_KINDS: dict[str, type[Event]] = {kind.__name__: kind for kind in get_args(Event)}


def to_json(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, **asdict(event)}


def from_json(data: dict[str, Any]) -> Event:
    """Read an event from the output of `to_json`; raise `InputError` for anything else."""
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
        # Only the fields that a ledger may leave out are checked; a wrong type in another field fails in the accountant.
        attained = getattr(event, "attained", False)
        require(
            type(attained) is bool, f"attained is {attained!r}; it says whether the bound is reached, true or false."
        )
        if isinstance(event, GaussianEvent):
            require(bool(event.queries), "queries is empty; an event answers at least one query.")
            words, told = get_args(BeyondSum), event.beyond_sum
            require(told in words, f"beyond_sum is {told!r}; it must be one of {', '.join(words)}.")
            numbers = {"other_mu": event.other_mu, **{f"diameter of {q.name}": q.diameter for q in event.queries}}
            for name, value in numbers.items():
                right = value is None or (type(value) in (int, float) and value >= 0.0)
                require(right, f"{name} is {value!r}; it must be a number, zero or more.")
        return event
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"an event of kind {kind!r} has wrong fields: {error}.") from None


GammaRule = Literal["exact", "paper", "optimal"]
Votes = tuple[tuple[str, float], ...]
"""The name of each vote and the standard deviation of the noise on its sum."""


@dataclass(frozen=True)
class RoundSettings:
    """The settings from which the event of a round is made; `dimension` is None if no model is known."""

    noise_multiplier: float | None = None
    adjacency: Adjacency = "replace-one"
    sampling: Sampling = Sampling()
    epsilons: tuple[float, float, float] = (2.0, 2.0, 2.0)
    gamma: GammaRule = "exact"
    dimension: int | None = None


def central_gaussian(
    noise_multiplier: float,
    adjacency: Adjacency = "replace-one",
    sampling: Sampling = Sampling(),
    *,
    scalar_multiplier: float | None = None,
    votes: Votes = (),
) -> GaussianEvent:
    """Return the event of a trusted server's noisy sum, with the paper's squared norms and the votes if they are released.

    The noise on the sum of updates is `noise_multiplier`·C; the sum changes by 2C under replace-one and by C under add-remove. The
    noise on the sum of squared norms is `scalar_multiplier`·C²; None if the squared norms are not released.
    """
    z = noise_multiplier
    queries = [Query(UPDATE, 1.0, 2.0 if adjacency == "replace-one" else 1.0, z, diameter=2.0)]
    replaced, left_out = 2.0 / z, 1.0 / z
    if scalar_multiplier is not None:
        queries.append(Query(SQUARES, 1.0, 1.0, scalar_multiplier, diameter=1.0))
        replaced = gdp.joint_mu(1.0, z, scalar_multiplier)
        left_out = math.hypot(left_out, 1.0 / scalar_multiplier)
    for name, noise in votes:
        queries.append(_vote(name, noise, adjacency))
        replaced, left_out = math.hypot(replaced, 1.0 / noise), math.hypot(left_out, 0.5 / noise)
    # The supremum is attained in all queries at once by an update of norm C that is left out or negated. The vote "within clip" can
    # differ independently, because the update may have been longer before it was clipped. Other votes may depend on the update
    # (such as whether training helped): then possibly no pair of neighbors reaches the bounds of both.
    tied = any(name != "within clip" for name, _ in votes)
    return _central(adjacency, queries, sampling, not tied, replaced, left_out)


def two_party(event: GaussianEvent, sampling: Sampling = Sampling(), noise_by: NoiseBy = "both") -> GaussianEvent:
    """Return the event of a two-party round against either aggregator, for which sampling does not amplify.

    `event` is the event of a trusted server with the noise of one aggregator and with full participation.
    """
    return replace(event, setting="two-party", sampling=sampling, attained=False, noise_by=noise_by)


def votes_only(votes: Votes, adjacency: Adjacency = "replace-one", sampling: Sampling = Sampling()) -> GaussianEvent:
    """Return the event of a trusted server's noisy votes without an update.

    A vote with several bins counts as one vote: a client is in one bin only, so the bins together change by ½ in norm when it is
    left out and by at most 1 when it is replaced; every bin has the same noise.
    """
    require(len(votes) > 0, "votes is empty; a round without an update must release at least one vote.")
    queries = [_vote(name, noise, adjacency) for name, noise in votes]
    # A client can change its votes independently of each other, so the joint shift is that of the votes composed one by one.
    replaced = math.hypot(*(1.0 / noise for _, noise in votes))
    return _central(adjacency, queries, sampling, True, replaced, replaced / 2.0)


def _central(
    adjacency: Adjacency, queries: Sequence[Query], sampling: Sampling, free: bool, replaced: float, left_out: float
) -> GaussianEvent:
    """Return the event of the queries, with its joint μ if proven; `free`: some neighbors reach the bounds of all queries."""
    full = sampling.kind == "full"
    event = GaussianEvent("central", adjacency, tuple(queries), sampling, attained=full and free)
    if not full or len(queries) == 1:
        return event
    joint, other = (replaced, left_out) if adjacency == "replace-one" else (left_out, replaced)
    return replace(event, joint_mu=joint, other_mu=other)


def _vote(name: str, noise: float, adjacency: Adjacency) -> Query:
    require(
        name not in OWN_QUERIES, f"a vote is called {name!r}, as a query of the mechanism's own; call it otherwise."
    )
    require(noise > 0.0, f"the vote {name!r} has noise {noise}; it must be a positive number.")
    return Query(name, 0.5, 1.0 if adjacency == "replace-one" else 0.5, noise, diameter=1.0)


def local_gaussian(noise_multiplier: float, sampling: Sampling = Sampling(), *, squares: bool = False) -> GaussianEvent:
    """Return the event of one client's report with noise zC per coordinate. The server sees the sender: sampling does not amplify.

    `squares` says whether the step size of the server uses the squared norm of every report.
    """
    update = Query(UPDATE, 1.0, 2.0, noise_multiplier, diameter=2.0)
    beyond: BeyondSum = "squares" if squares else "nothing"
    return GaussianEvent("local", "replace-one", (update,), sampling, attained=True, beyond_sum=beyond)


def privunit(
    epsilon0: float,
    epsilon1: float,
    epsilon2: float,
    *,
    gamma: GammaRule = "exact",
    dimension: int | None = None,
    sampling: Sampling = Sampling(),
) -> PrivUnitEvent:
    """Return the event of a report of PrivUnit(ε₀, ε₁) × ScalarDP(ε₂); with the exact γ it does not depend on the dimension."""
    for name, value in (("epsilon0", epsilon0), ("epsilon1", epsilon1), ("epsilon2", epsilon2)):
        require(0.0 < value <= 500.0, f"{name} is {value}; it must be above 0 and at most 500.")
    if gamma == "exact":
        p, cap = 1.0 / (1.0 + math.exp(-epsilon0)), 1.0 / (1.0 + math.exp(epsilon1))
    else:
        if dimension is None or dimension < 2:
            raise InputError(
                f"dimension is {dimension} with gamma {gamma!r}, whose cap depends on it; it must be the number of parameters, "
                "at least 2."
            )
        constants = direction(dimension, epsilon0, epsilon1, gamma)
        p, cap = constants.p, constants.q
    nominal = epsilon0 + epsilon1 + epsilon2
    return PrivUnitEvent(p, cap, epsilon2, level_count(epsilon2), nominal, sampling=sampling, attained=True)


def round_event(kind: str, settings: RoundSettings) -> Event | None:
    """Return the event of one round of a mechanism of this library; None if `kind` is another mechanism."""
    if kind == "none":
        return NonPrivateEvent()
    if kind not in ("central-gaussian", "two-party", "two-party-one-sided", "local-gaussian", "privunit"):
        return None
    require(
        kind == "central-gaussian" or settings.adjacency == "replace-one",
        f"adjacency is {settings.adjacency!r} with {kind}; it must be 'replace-one', because a client's message shows that the "
        "client takes part.",
    )
    sampling, z = settings.sampling, settings.noise_multiplier
    if kind == "privunit":
        return privunit(*settings.epsilons, gamma=settings.gamma, dimension=settings.dimension, sampling=sampling)
    if z is None:
        raise InputError(f"noise-multiplier is missing; {kind} needs one, such as --noise-multiplier 5.")
    require(z > 0.0 and math.isfinite(z), f"noise-multiplier is {z}; it must be a finite number above 0.")
    if kind == "local-gaussian":
        return local_gaussian(z, sampling)
    if kind == "central-gaussian":
        return central_gaussian(z, settings.adjacency, sampling)
    return two_party(central_gaussian(z), sampling, "both" if kind == "two-party" else "helper")


@dataclass(frozen=True)
class Direction:
    """The constants of PrivUnit on the sphere in R^d: P(cap) = p, cap {⟨v,u⟩ ≥ γ} of mass q, and log m with ‖z‖ = 1/m."""

    dimension: int
    p: float
    gamma: float
    q: float
    log_m: float

    @property
    def m(self) -> float:
        return math.exp(self.log_m)

    @property
    def epsilon(self) -> float:
        """The exact ε of V: the log of the ratio of the densities inside and outside the cap."""
        return math.log(self.p / (1 - self.p)) + math.log((1 - self.q) / self.q)


@lru_cache(maxsize=256)
def direction(dimension: int, epsilon0: float, epsilon1: float, rule: GammaRule = "exact") -> Direction:
    """Compute the constants of PrivUnit: γ is the edge of the cap, q its mass, and 1/m the norm of the estimate (`Direction`).

    The rules for γ:
        exact: the largest γ that ε₁ allows: q = 1/(1 + e^{ε₁}).
        paper: γ = tanh(ε₁/2)·sqrt(π/(2(d−1))), the paper's first condition: sufficient but not necessary, and unsound at d = 2.
        optimal: ε₀ + ε₁ split so that 1/m, and with it the variance, is smallest (Asi, Feldman and Talwar 2022).
    """
    require(dimension >= 2, f"PrivUnit needs a model of at least 2 parameters; this one has {dimension}.")
    for name, value in (("epsilon0", epsilon0), ("epsilon1", epsilon1)):
        require(0 < value <= 500, f"{name} is {value}; it must be above 0 and at most 500.")
    if rule == "optimal":
        from scipy.optimize import minimize_scalar

        total = epsilon0 + epsilon1
        best = minimize_scalar(
            lambda e0: -direction(dimension, e0, total - e0).log_m,
            bounds=(1e-3 * total, 0.999 * total),
            method="bounded",
            options={"xatol": 1e-6 * total},
        )
        return direction(dimension, float(best.x), total - float(best.x))
    p, half = 1 / (1 + math.exp(-epsilon0)), (dimension - 1) / 2
    if rule == "exact":
        q = 1 / (1 + math.exp(epsilon1))
        gamma = math.sqrt(betainccinv(0.5, half, 2 * q))
        require(
            gamma < 1,
            f"PrivUnit with {dimension} parameters has an empty cap in double precision at epsilon1 = {epsilon1:.4g}; ask for a "
            "smaller epsilon.",
        )
    else:
        require(rule == "paper", f"gamma is {rule!r}; it must be 'exact', 'paper' or 'optimal'.")
        gamma = math.tanh(epsilon1 / 2) * math.sqrt(math.pi / (2 * (dimension - 1)))
        require(
            gamma < 1,
            f"the paper's rule gives gamma = {gamma:.3f} for epsilon1 = {epsilon1} and {dimension} parameters, an empty cap; "
            "use gamma='exact'.",
        )
        q = 0.5 * float(betaincc(0.5, half, gamma * gamma))
    log_cap = -betaln(0.5, half) + half * math.log1p(-gamma * gamma) - math.log(dimension - 1)
    return Direction(dimension, p, gamma, q, float(log_cap + math.log((p - q) / (q * (1 - q)))))


def level_count(epsilon2: float) -> int:
    """Return k = ⌈e^{ε₂/3}⌉: the levels of ScalarDP are 0, …, k."""
    return math.ceil(math.exp(epsilon2 / 3) * (1 - 1e-12))
