"""What an answer costs the node that gives it.

The node knows that it was asked, so sampling amplifies nothing for it, and all of its data may be replaced, those of every client
that it hosts included.
"""

from __future__ import annotations

from dataclasses import replace

from dpfedexp.accounting import Event
from dpfedexp.accounting.compose import Charges, compose
from dpfedexp.accounting.events import NonPrivateEvent
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
    """ε of everything that a node answered, against an observer of all of it.

    What a round of one setting promises against its own observers holds against this one too, who sees nothing else of it. So
    rounds of several settings compose as those of one do.
    """
    return compose([(_observed(event), count) for event, count in charges], delta).epsilon


def _observed(event: Event) -> Event:
    return event if isinstance(event, NonPrivateEvent) else replace(event.unsampled(), setting="local")
