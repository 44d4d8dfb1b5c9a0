"""What an answer costs the node that gives it.

The node knows that it was asked, so sampling amplifies nothing for it, and all of its data may be replaced, those of every client
that it hosts included.
"""

from __future__ import annotations

from dpfedexp.accounting import Event
from dpfedexp.accounting.compose import Charges, compose
from dpfedexp.errors import require
from dpfedexp.mechanisms import Mechanism


class Refused(RuntimeError):
    """The node does not take part; the message says why and holds nothing about its data.

    `shown` is what the server is told, where the message itself would tell it of other runs or of the node's files. How much a
    node has spent elsewhere says how often it was drawn there, which is secret under sampling.
    """

    def __init__(self, reason: str, shown: str | None = None) -> None:
        super().__init__(reason)
        self.shown = reason if shown is None else shown


def node_charge(mechanism: Mechanism, clients: int) -> tuple[Event, int]:
    """The event that an answer for so many hosted clients is charged with, and how often."""
    require(clients >= 1, f"the number of clients is {clients}; it must be a positive whole number.")
    return mechanism.client_event().hosted(clients)


def total(charges: Charges, delta: float) -> float:
    """ε of everything that a node answered. Central and local rounds promise things about different observers, so their ε are
    added, with the δ shared between them."""
    settings: dict[str, list[tuple[Event, int]]] = {}
    for event, count in charges:
        settings.setdefault(event.setting, []).append((event, count))
    return sum(compose(part, delta / len(settings)).epsilon for part in settings.values())
