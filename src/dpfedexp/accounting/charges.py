"""What one round of each mechanism charges, from its settings alone; mechanisms, command line and the paper's tables all ask here.

Everything is in units of the clip C, so rounds with different adaptive clips are the same event. PrivUnit's constants are here too:
the mechanism draws from them and the accountant charges them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from scipy.special import betaincc, betainccinv, betaln

from dpfedexp.accounting import events
from dpfedexp.accounting.events import Adjacency, Event, GaussianEvent, PrivUnitEvent, Query, Sampling
from dpfedexp.accounting.gdp import joint_mu
from dpfedexp.errors import InputError, require

GammaRule = Literal["exact", "paper", "optimal"]
Votes = tuple[tuple[str, float], ...]
"""Names of votes, and the noise on each."""


@dataclass(frozen=True)
class RoundSettings:
    """What an event is made from, also where there is no run yet: `dpfedexp privacy`, tables, sweeps.

    Args:
        noise_multiplier: z of Gaussian noise, on the sum (central) or on each report (local).
        adjacency: between which data sets the round must not tell.
        sampling: who takes part.
        epsilons: PrivUnit's ε₀, ε₁, ε₂.
        gamma: PrivUnit's cap.
        dimension: parameters of the model, where the event depends on them.
    """

    noise_multiplier: float | None = None
    adjacency: Adjacency = "replace-one"
    sampling: Sampling = field(default_factory=Sampling)
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
    """A trusted server's noisy sum, with the paper's squared norms and with votes where they are released too.

    Args:
        noise_multiplier: z, the noise on the sum of updates over C.
        adjacency: replace-one moves the sum by 2C, add-remove by C.
        sampling: who takes part.
        scalar_multiplier: the noise on the sum of squared norms over C²; None where they are not released.
        votes: the name of every vote that is released, and the noise on the sum of its shares.
    """
    z = noise_multiplier
    queries = [Query(events.UPDATE, 1.0, 2.0 if adjacency == "replace-one" else 1.0, z, diameter=2.0)]
    replaced, left_out = 2.0 / z, 1.0 / z
    if scalar_multiplier is not None:
        queries.append(Query(events.SQUARES, 1.0, 1.0, scalar_multiplier, diameter=1.0))
        replaced = joint_mu(1.0, z, scalar_multiplier)
        left_out = math.hypot(left_out, 1.0 / scalar_multiplier)
    for name, noise in votes:
        queries.append(_vote(name, noise, adjacency))
        replaced, left_out = math.hypot(replaced, 1.0 / noise), math.hypot(left_out, 0.5 / noise)
    # Attained, all queries at once: an update of norm C, left out or turned round. Whether it was within the clip is free to
    # differ: it may have been longer before it was clipped. Further votes may be tied to the update, as whether training helped
    # is: then no pair of neighbours moves both to the full.
    tied = any(name != "within clip" for name, _ in votes)
    return _central(adjacency, queries, sampling, not tied, replaced, left_out)


def two_party(
    event: GaussianEvent, sampling: Sampling = Sampling(), noise_by: events.NoiseBy = "both"
) -> GaussianEvent:
    """A central round whose sum two aggregators make together, as either of them sees it: sampling hides nobody from it.

    Args:
        event: the round of a trusted server with the noise that one aggregator adds and with full participation.
        sampling: who takes part, for readers of the models.
        noise_by: who adds the noise.
    """
    return replace(event, setting="two-party", sampling=sampling, attained=False, noise_by=noise_by)


def votes_only(votes: Votes, adjacency: Adjacency = "replace-one", sampling: Sampling = Sampling()) -> GaussianEvent:
    """A trusted server's noisy votes without an update.

    A vote that is asked in bins is one vote here: a client is in one bin only, so it moves all the bins together by ½ when it is
    left out and by at most 1 when it is replaced, with the same noise on every bin.

    Args:
        votes: the name of every vote that is released, and the noise on the sum of its shares, or on each of its bins.
        adjacency: replace-one moves a sum of shares by 1, add-remove by ½.
        sampling: who takes part.
    """
    require(len(votes) > 0, "votes is empty; a round without an update must release at least one vote.")
    queries = [_vote(name, noise, adjacency) for name, noise in votes]
    # Votes are free to differ independently of each other, so the joint shift is that of the votes composed one by one.
    replaced = math.hypot(*(1.0 / noise for _, noise in votes))
    return _central(adjacency, queries, sampling, True, replaced, replaced / 2.0)


def _central(
    adjacency: Adjacency, queries: Sequence[Query], sampling: Sampling, free: bool, replaced: float, left_out: float
) -> GaussianEvent:
    """The event of these queries, with their joint μ where it is proven; `free`: some neighbours move all queries to the full."""
    full = sampling.kind == "full"
    event = GaussianEvent("central", adjacency, tuple(queries), sampling, attained=full and free)
    if not full or len(queries) == 1:
        return event
    joint, other = (replaced, left_out) if adjacency == "replace-one" else (left_out, replaced)
    return replace(event, joint_mu=joint, other_mu=other)


def _vote(name: str, noise: float, adjacency: Adjacency) -> Query:
    """A client's share is within ±½."""
    require(
        name not in events.OWN_QUERIES,
        f"a vote is called {name!r}, as a query of the mechanism's own; call it otherwise.",
    )
    require(noise > 0.0, f"the vote {name!r} has noise {noise}; it must be a positive number.")
    return Query(name, 0.5, 1.0 if adjacency == "replace-one" else 0.5, noise, diameter=1.0)


def local_gaussian(noise_multiplier: float, sampling: Sampling = Sampling(), *, squares: bool = False) -> GaussianEvent:
    """A client's own report with noise zC in every coordinate.

    Args:
        noise_multiplier: z, the noise on a report over C.
        sampling: who takes part. The server sees who sent what, so it amplifies nothing; the event names it for other readers.
        squares: whether the server's step size uses the squared norm of every report.
    """
    update = Query(events.UPDATE, 1.0, 2.0, noise_multiplier, diameter=2.0)
    event = GaussianEvent("local", "replace-one", (update,), sampling, attained=True, beside_sum="nothing")
    return replace(event, beside_sum="squares") if squares else event


def privunit(
    epsilon0: float,
    epsilon1: float,
    epsilon2: float,
    *,
    gamma: GammaRule = "exact",
    dimension: int | None = None,
    sampling: Sampling = Sampling(),
) -> PrivUnitEvent:
    """A report of PrivUnit(ε₀, ε₁) × ScalarDP(ε₂); with the exact γ it is the same in every dimension."""
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
    """What one round of a mechanism of this library costs, from its settings alone; None for a kind that is not known here."""
    if kind == "none":
        return events.NonPrivateEvent()
    if kind not in ("central-gaussian", "two-party", "two-party-one-sided", "local-gaussian", "privunit"):
        return None
    require(
        kind == "central-gaussian" or settings.adjacency == "replace-one",
        f"adjacency is {settings.adjacency!r} with {kind}; it must be 'replace-one', because whoever receives a client's message "
        "sees that the client is there.",
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
        """The exact ε of V: the log of the ratio of the density inside the cap to that outside."""
        return math.log(self.p / (1 - self.p)) + math.log((1 - self.q) / self.q)


@lru_cache(maxsize=256)
def direction(dimension: int, epsilon0: float, epsilon1: float, rule: GammaRule = "exact") -> Direction:
    """PrivUnit's constants.

    The rules:
        exact: the largest γ that ε₁ allows: q = 1/(1 + e^{ε₁}).
        paper: γ = tanh(ε₁/2)·sqrt(π/(2(d−1))), the paper's first condition: only sufficient, and unsound at d = 2.
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
    """k = ⌈e^{ε₂/3}⌉: ScalarDP's levels are 0, …, k."""
    return math.ceil(math.exp(epsilon2 / 3) * (1 - 1e-12))
