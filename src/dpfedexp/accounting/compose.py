"""Composition of rounds by the tightest sound accountant, which is chosen automatically and named in the result.

All accountants in this package allow adaptive composition: a round may depend on the earlier releases.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from dpfedexp.accounting import gdp, privunit
from dpfedexp.accounting.events import Adjacency, Event, GaussianEvent, PrivUnitEvent, PureEvent
from dpfedexp.errors import checked, require

Setting = Literal["central", "local", "two-party", "none"]
Charges = Iterable[tuple[Event, int]]

GAUSSIAN = "exact Gaussian (GDP)"
GAUSSIAN_BOUND = "Gaussian (GDP)"
"""The name of the accountant if the μ of a round is an upper bound: queries composed one by one, or noise on a grid."""
NOT_PRIVATE = "none (not private)"
NOTHING = "none (nothing was released)"


@checked
@dataclass(frozen=True)
class Guarantee:
    """(ε, δ)-differential privacy of everything that was charged, for one client, under `adjacency`.

    `exact` says whether no smaller ε holds at this δ; otherwise ε is an upper bound. `mu` is set if the guarantee is μ-GDP;
    `pure_epsilon` is the ε at δ = 0, if there is one.
    """

    epsilon: float
    delta: float
    adjacency: Adjacency
    setting: Setting
    accountant: str
    mu: float | None = None
    pure_epsilon: float | None = None
    exact: bool = False


@checked
def compose(charges: Charges, delta: float) -> Guarantee:
    """Compose charges into one guarantee at δ.

    Different kinds of events may be mixed. All charges must have the same setting (central, local or two-party) and the
    same adjacency.
    """
    require(0.0 <= delta < 1.0, f"delta is {delta}; it must be at least 0 and below 1.")
    counts: Counter[Event] = Counter()
    for event, count in charges:
        require(count >= 0, f"the number of rounds is {count}; it must be zero or more.")
        if count:
            counts[event] += count
    return _compose(tuple(counts.items()), float(delta))


@lru_cache(maxsize=65536)
def _compose(counts: tuple[tuple[Event, int], ...], delta: float) -> Guarantee:
    if not counts:
        return Guarantee(0.0, delta, "replace-one", "none", NOTHING, exact=True)
    adjacency, setting = _common(counts)
    if any(event.family == "none" for event, _ in counts):
        return Guarantee(math.inf, delta, adjacency, setting, NOT_PRIVATE, exact=True)
    gaussian = [(event, n) for event, n in counts if isinstance(event, GaussianEvent)]
    reports = [(event, n) for event, n in counts if isinstance(event, PrivUnitEvent | PureEvent)]
    if not gaussian:
        pure = privunit.pure_epsilon(reports)
        epsilon, accountant = privunit.epsilon(reports, delta)
        # At δ = 0 the sum is exact too: every report can reach its ε at once.
        exact = accountant == privunit.EXACT or (delta == 0.0 and all(event.exact for event, _ in reports))
        return Guarantee(epsilon, delta, adjacency, setting, accountant, pure_epsilon=pure, exact=exact)
    epsilon, accountant, mu = _gaussian_epsilon(gaussian, delta)
    if not reports:
        return Guarantee(epsilon, delta, adjacency, setting, accountant, mu=mu, exact=accountant == GAUSSIAN)
    if mu is None:
        epsilon += privunit.pure_epsilon(reports)
        return Guarantee(epsilon, delta, adjacency, setting, f"{accountant} + {privunit.PURE}")
    epsilon, composition = privunit.epsilon_with_gaussian(reports, mu, delta)
    return Guarantee(epsilon, delta, adjacency, setting, f"{GAUSSIAN_BOUND} + {composition.removeprefix('exact ')}")


def _gaussian_epsilon(charges: list[tuple[GaussianEvent, int]], delta: float) -> tuple[float, str, float | None]:
    mu = gdp.compose(event.mu * math.sqrt(n) for event, n in charges)
    # In the local setting the observer is the server, in the two-party setting an aggregator: both know who took part.
    if not any(event.setting == "central" and event.sampling.rate < 1.0 for event, _ in charges):
        exact = all(event.exact for event, _ in charges)
        return gdp.epsilon(mu, delta), GAUSSIAN if exact else GAUSSIAN_BOUND, mu
    from dpfedexp.accounting import pld

    epsilon, accountant = pld.epsilon(charges, delta)
    return epsilon, accountant, None


def _common(counts: Iterable[tuple[Event, int]]) -> tuple[Adjacency, Setting]:
    private = [event for event, _ in counts if event.family != "none"]
    for name in ("adjacency", "setting"):
        values = sorted({getattr(event, name) for event in private})
        require(
            len(values) <= 1,
            f"the charges have {name} {' and '.join(map(repr, values))}; all the rounds of one statement must share "
            "one, because their guarantees are about different changes of the data.",
        )
    return (private[0].adjacency, private[0].setting) if private else ("replace-one", "none")
