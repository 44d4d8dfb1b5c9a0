"""What the rounds so far have cost, for the record that every round leaves."""

from __future__ import annotations

from dpfedexp.accounting import GaussianEvent, Ledger, compose

EXACT = 8
"""Up to so many sampled rounds the record of each has its own ε."""
GROWTH = 1.25
"""From one number of rounds for which ε is computed to the next, in longer runs."""


def epsilon_so_far(ledger: Ledger, delta: float, *, last: bool) -> float:
    """ε of everything that was charged, or where that takes long an upper bound: ε of up to a quarter more rounds.

    The cost of rounds that sample by Poisson takes a tenth of a second or more to compute, for every number of rounds anew. After
    the first few it is therefore computed for some numbers of rounds only, and a record gets that of the next one: more rounds cost
    more. Which numbers these are depends on nothing, so that a run which goes on records what it would have. The `last` record, and
    every statement, is of what was charged.

    Args:
        ledger: with the round in it.
        delta: δ of the promise.
        last: whether no further round is planned.
    """
    charges = ledger.charges()
    sampled = [
        (n, event) for event, n in charges if isinstance(event, GaussianEvent) and event.sampling.kind == "poisson"
    ]
    _, event = max(sampled, key=lambda pair: pair[0], default=(0, None))
    if event is None or last or event.setting == "local":
        return compose(charges, delta).epsilon
    return compose([(one, next_known(n) if one == event else n) for one, n in charges], delta).epsilon


def next_known(rounds: int) -> int:
    """The smallest number of rounds, not below this one, for which ε is computed."""
    known = EXACT
    while known < rounds:
        known = max(known + 1, int(known * GROWTH))
    return known if rounds > EXACT else rounds
