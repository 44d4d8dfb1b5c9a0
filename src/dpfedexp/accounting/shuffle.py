"""What reports that are ε₀-DP by themselves promise against whoever sees them only shuffled.

A server that shows only models, computed from sums over its clients, shows no more than the reports of the round in random order.
Among n such reports one client hides (Feldman, McMillan and Talwar, "Hiding Among the Clones", FOCS 2021, theorem 3.1): under
replace-one adjacency and for ε₀ ≤ log(n / (16·log(2/δ))) they are together (ε, δ)-DP with

    ε = log(1 + (e^ε₀ − 1)/(e^ε₀ + 1) · (8·√(e^ε₀·log(4/δ)/n) + 8·e^ε₀/n)).

Rounds compose as every (ε, δ)-DP release does: randomised response at ε in each of them, after a failure with probability δ
(Kairouz, Oh and Viswanath 2015). Half of the total δ pays for the failures, the other half for the composition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dpfedexp.accounting import privunit
from dpfedexp.accounting.events import ReportEvent

SHUFFLE = "amplification by shuffling"


def amplified(epsilon0: float, clients: int, delta: float) -> float | None:
    """ε at δ of `clients` shuffled ε₀-DP reports; None where the theorem says nothing."""
    if clients < 1 or delta <= 0.0 or epsilon0 > math.log(clients / (16.0 * math.log(2.0 / delta))):
        return None
    spread = 8.0 * math.sqrt(math.exp(epsilon0) * math.log(4.0 / delta) / clients) + 8.0 * math.exp(epsilon0) / clients
    return min(epsilon0, math.log1p(math.tanh(epsilon0 / 2.0) * spread))


def epsilon(charges: Sequence[tuple[ReportEvent, int]], delta: float, clients: int) -> float | None:
    """ε at δ over all the rounds for whoever sees each of them shuffled; None where a round is not amplified."""
    rounds = sum(n for _, n in charges)
    share = delta if rounds == 1 else delta / (2.0 * rounds)
    each = [(amplified(event.epsilon, clients, share), n) for event, n in charges]
    if not each or any(one is None for one, _ in each):
        return None
    known = [(one, n) for one, n in each if one is not None]
    if rounds == 1:
        return known[0][0]
    return privunit.response_epsilon(known, delta / 2.0)
