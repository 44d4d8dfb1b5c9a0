"""The same charges seen by another observer or under another adjacency.

The charges alone decide. Where they prove nothing, the answer is a reason and not a number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from dpfedexp.accounting import shuffle
from dpfedexp.accounting.compose import compose
from dpfedexp.accounting.events import Adjacency, Event, GaussianEvent, PrivUnitEvent, PureEvent, ReportEvent
from dpfedexp.accounting.statements.promise import View

OTHER: dict[str, Adjacency] = {"replace-one": "add-remove", "add-remove": "replace-one"}

NOT_LEFT_OUT = "the charges say what replacing a client changes, and not what leaving one out does"
NO_ADD_REMOVE = "a client's own message shows that the client is there; only what it holds can be hidden"
NOT_COUNTED = (
    "it is not known how many clients report in every round, each from its own data and the released models alone"
)
SAMPLED = "only some of the clients report in a round, and how much noise they add together is not fixed"
UNSAID = "the ledger was written before it said what the server computes from the reports"
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

Counts = Sequence[tuple[Event, int]]


def round_delta(charges: Counts, delta: float) -> float:
    """The δ at which a single round is quoted: 0 where every round is pure."""
    return 0.0 if charges and all(event.family == "report" for event, _ in charges) else delta


def view(charges: Counts, delta: float) -> View:
    """The charges as they are: the most expensive round, and all of them together."""
    total = compose(charges, delta)
    single = round_delta(charges, delta)
    one = max((compose([(event, 1)], single).epsilon for event, _ in charges), default=0.0)
    return View(total.adjacency, one, total.epsilon, total.accountant, total.exact)


def other_adjacency(charges: Counts, delta: float) -> tuple[View | None, str]:
    """The view under the other adjacency, or None and why there is none."""
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


def models_only(charges: Counts, delta: float, reporting: int, clients: int) -> tuple[View | None, str]:
    """A local or two-party run against whoever sees nothing but the models, or None and why there is no figure.

    Assumes that the server shows only models and does not help the reader, and that at least `reporting` of the `clients` add
    their noise in every round and keep it to themselves.
    """
    if charges and all(isinstance(event, GaussianEvent) and event.setting == "two-party" for event, _ in charges):
        return view([(e.to_readers(), n) for e, n in charges if isinstance(e, GaussianEvent)], delta), ""
    if not charges or any(event.setting != "local" for event, _ in charges):
        return None, ""
    gaussian = [(event, n) for event, n in charges if isinstance(event, GaussianEvent)]
    reports = [(event, n) for event, n in charges if isinstance(event, PrivUnitEvent | PureEvent)]
    if gaussian and reports:
        return None, MIXED
    return _shuffled(reports, delta, reporting) if reports else _summed(gaussian, delta, reporting, clients)


def _summed(
    charges: Sequence[tuple[GaussianEvent, int]], delta: float, reporting: int, clients: int
) -> tuple[View | None, str]:
    """The sum of n reports is the sum of their rows with noise of √n times the standard deviation."""
    for event, _ in charges:
        if event.beside_sum != "nothing":
            return None, MORE_THAN_THE_SUM[event.beside_sum]
        if event.sampling.kind != "full":
            return None, SAMPLED
    if reporting < 1:
        return None, NOT_COUNTED
    return view([(_of_the_sum(event, reporting, clients), n) for event, n in charges], delta), ""


def _of_the_sum(event: GaussianEvent, reporting: int, clients: int) -> GaussianEvent:
    queries = tuple(replace(q, noise=q.noise * math.sqrt(reporting)) for q in event.queries)
    return replace(event, queries=queries, attained=event.attained and reporting == clients)


def _shuffled(charges: Sequence[tuple[ReportEvent, int]], delta: float, reporting: int) -> tuple[View | None, str]:
    """The server's sums do not depend on the order of the reports, so whoever sees the models sees no more than a shuffle."""
    for event, _ in charges:
        if event.sampling is None:
            return None, UNSAID
        if event.sampling.kind != "full":
            return None, SAMPLED
    if reporting < 1:
        return None, NOT_COUNTED
    total = shuffle.epsilon(charges, delta, reporting)
    rounds = [shuffle.epsilon([(event, 1)], delta, reporting) for event, _ in charges]
    if total is None or total >= compose(charges, delta).epsilon:
        return None, NO_SHUFFLING
    one = max(epsilon for epsilon in rounds if epsilon is not None)
    return View("replace-one", one, total, shuffle.SHUFFLE, False), ""
