"""The guarantee of the same charges under each adjacency and for each observer, or the reason why there is none."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Event, GaussianEvent

NOT_LEFT_OUT = "the charges say what replacing a client changes, and not what leaving one out does"
NO_ADD_REMOVE = "a client's own message shows that the client is there; only what it holds can be hidden"
NOT_COUNTED = (
    "it is not known how many clients report in every round, each from its own data and the released models alone"
)
SAMPLED = "only some of the clients report in a round, and how much noise they add together is not fixed"
MORE_THAN_THE_SUM = {
    "unknown": "the mechanism does not say what the server computes from the reports",
    "squares": "the step size uses the squared norm of every report, so the models show more than the sum of the reports",
    "rounding": "strict noise is rounded in every report, so the models show slightly more than the sum of the reports",
}
NOT_GAUSSIAN = "a smaller figure for the sum of the reports is known only if all of them have Gaussian noise"

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
        turned.append((event.under("add-remove" if event.adjacency == "replace-one" else "replace-one"), n))
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
    summed: list[tuple[Event, int]] = []
    for event, n in charges:
        if not isinstance(event, GaussianEvent):
            return None, NOT_GAUSSIAN
        if event.beyond_sum != "nothing":
            return None, MORE_THAN_THE_SUM[event.beyond_sum]
        if event.sampling.kind != "full":
            return None, SAMPLED
        # The sum of n reports is the sum of n vectors plus noise with √n times the standard deviation.
        queries = tuple(replace(q, noise=q.noise * math.sqrt(max(reporting, 0))) for q in event.queries)
        summed.append((replace(event, queries=queries, attained=event.attained and reporting == clients), n))
    return (view(summed, delta), "") if reporting >= 1 else (None, NOT_COUNTED)
