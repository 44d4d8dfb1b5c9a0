"""The guarantee of the same charges under each adjacency and for each observer, or the reason why there is none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpfedexp.accounting import privunit
from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Adjacency, Event, GaussianEvent, PrivUnitEvent, PureEvent, ReportEvent

OTHER: dict[str, Adjacency] = {"replace-one": "add-remove", "add-remove": "replace-one"}

NOT_LEFT_OUT = "the charges say what replacing a client changes, and not what leaving one out does"
NO_ADD_REMOVE = "a client's own message shows that the client is there; only what it holds can be hidden"
NOT_COUNTED = (
    "it is not known how many clients report in every round, each from its own data and the released models alone"
)
SAMPLED = "only some of the clients report in a round, and how much noise they add together is not fixed"
UNSAID = "the mechanism does not say what the server computes from the reports, or from whom they come"
MORE_THAN_THE_SUM = {
    "unknown": UNSAID,
    "squares": "the step size uses the squared norm of every report, so the models show more than the sum of the reports",
    "rounding": "strict noise is rounded in every report, so the models show slightly more than the sum of the reports",
}
NO_SHUFFLING = (
    "hiding one report among the others (amplification by shuffling) is proven only for reports that say less or for "
    "more clients"
)
MIXED = "the rounds use different kinds of noise"

SHUFFLE = "amplification by shuffling"

EventCounts = Sequence[tuple[Event, int]]


@dataclass(frozen=True)
class View:
    """The ε of a run under `adjacency` against one observer.

    `epsilon_round` is the ε of the most expensive single round. `exact` says that no smaller total holds at the same δ;
    otherwise the total is an upper bound.
    """

    adjacency: str
    epsilon_round: float
    epsilon_total: float
    accountant: str
    exact: bool


def round_delta(charges: EventCounts, delta: float) -> float:
    """Return the δ of the figure for a single round: 0 if every event is ε-DP by itself."""
    return 0.0 if charges and all(event.family == "report" for event, _ in charges) else delta


def view(charges: EventCounts, delta: float) -> View:
    """Return ε of the most expensive round and of all charges together, under their own adjacency."""
    total = compose(charges, delta)
    single = round_delta(charges, delta)
    one = max((compose([(event, 1)], single).epsilon for event, _ in charges), default=0.0)
    return View(total.adjacency, one, total.epsilon, total.accountant, total.exact)


def other_adjacency(charges: EventCounts, delta: float) -> tuple[View | None, str]:
    """Return the view under the other adjacency, or None and the reason why there is none."""
    turned: list[tuple[Event, int]] = []
    for event, n in charges:
        if event.setting in ("local", "two-party"):
            return None, NO_ADD_REMOVE
        if event.family == "none":
            return None, ""
        if event.family == "report" and event.adjacency == "replace-one":
            return None, NOT_LEFT_OUT
        turned.append((event.under(OTHER[event.adjacency]), n))
    return (view(turned, delta), "") if turned else (None, "")


def models_only(charges: EventCounts, delta: float, reporting: int, clients: int) -> tuple[View | None, str]:
    """Return ε of a local or two-party run against an observer of the models only, or None and the reason why there is none.

    Assumes that the server shows only models and does not help the observer, and that at least `reporting` of the `clients` add
    their noise in every round and keep it secret.
    """
    if charges and all(isinstance(event, GaussianEvent) and event.setting == "two-party" for event, _ in charges):
        return view([(e.to_readers(), n) for e, n in charges if isinstance(e, GaussianEvent)], delta), ""
    if not charges or any(event.setting != "local" for event, _ in charges):
        return None, ""
    gaussian = [(event, n) for event, n in charges if isinstance(event, GaussianEvent)]
    reports = [(event, n) for event, n in charges if isinstance(event, PrivUnitEvent | PureEvent)]
    if gaussian and reports:
        return None, MIXED
    for event, _ in (*gaussian, *reports):
        if isinstance(event, GaussianEvent) and event.beyond_sum != "nothing":
            return None, MORE_THAN_THE_SUM[event.beyond_sum]
        if event.sampling is None:
            return None, UNSAID
        if event.sampling.kind != "full":
            return None, SAMPLED
    if reporting < 1:
        return None, NOT_COUNTED
    if gaussian:
        # The sum of n reports is the sum of n vectors plus noise with √n times the standard deviation.
        spread, everyone = math.sqrt(reporting), reporting == clients
        summed = [
            (replace(event, queries=tuple(replace(q, noise=q.noise * spread) for q in event.queries)), n)
            for event, n in gaussian
        ]
        return view([(replace(e, attained=e.attained and everyone), n) for e, n in summed], delta), ""
    # The server's sums do not depend on the order of the reports, so an observer of the models sees no more than a shuffle.
    total = shuffled_epsilon(reports, delta, reporting)
    if total is None or total >= compose(reports, delta).epsilon:
        return None, NO_SHUFFLING
    rounds = (shuffled_epsilon([(event, 1)], delta, reporting) for event, _ in reports)
    return View("replace-one", max(one for one in rounds if one is not None), total, SHUFFLE, False), ""


def amplified(epsilon0: float, clients: int, delta: float) -> float | None:
    """Compute ε at δ of `clients` shuffled ε₀-DP reports; None if the theorem does not apply.

    A server that shows only models, computed from sums over its clients, reveals no more than the reports of the round in random
    order, which hides each client (Feldman, McMillan and Talwar, "Hiding Among the Clones", FOCS 2021, theorem 3.1):
    under replace-one adjacency and for ε₀ ≤ log(n / (16·log(2/δ))) the n reports together are (ε, δ)-DP with

        ε = log(1 + (e^ε₀ − 1)/(e^ε₀ + 1) · (8·√(e^ε₀·log(4/δ)/n) + 8·e^ε₀/n)).
    """
    if clients < 1 or delta <= 0.0 or epsilon0 > math.log(clients / (16.0 * math.log(2.0 / delta))):
        return None
    spread = 8.0 * math.sqrt(math.exp(epsilon0) * math.log(4.0 / delta) / clients) + 8.0 * math.exp(epsilon0) / clients
    return min(epsilon0, math.log1p(math.tanh(epsilon0 / 2.0) * spread))


def shuffled_epsilon(charges: Sequence[tuple[ReportEvent, int]], delta: float, clients: int) -> float | None:
    """Compute ε at δ of all rounds for an observer of the shuffled reports of each round; None if a round is not amplified.

    Rounds compose like all (ε, δ)-DP releases: each one is randomized response at ε, except for a failure with probability δ
    (Kairouz, Oh and Viswanath 2015). Half of the total δ covers the failures, the other half the composition.
    """
    rounds = sum(n for _, n in charges)
    share = delta if rounds == 1 else delta / (2.0 * rounds)
    each = [(one, n) for event, n in charges if (one := amplified(event.epsilon, clients, share)) is not None]
    if not each or len(each) < len(charges):
        return None
    if rounds == 1:
        return each[0][0]
    return privunit.epsilon([(PureEvent(one, "local"), n) for one, n in each], delta / 2.0)[0]
