"""What an answer costs the node that gives it.

The node knows that it was asked, so sampling amplifies nothing for it, and all of its data may be replaced, those of every client
that it hosts included.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from dpfedexp.accounting import Event, GaussianEvent, NonPrivateEvent, PrivUnitEvent, Sampling, gdp
from dpfedexp.accounting.compose import Charges, compose
from dpfedexp.errors import require
from dpfedexp.mechanisms import CentralGaussian, Mechanism


class Refused(RuntimeError):
    """The node does not take part; the message says why and holds nothing about its data.

    `shown` is what the server is told, where the message itself would tell it of other runs or of the node's files. How much a
    node has spent elsewhere says how often it was drawn there, which is secret under sampling.
    """

    def __init__(self, reason: str, shown: str | None = None) -> None:
        super().__init__(reason)
        self.shown = reason if shown is None else shown


def client_event(mechanism: Mechanism, sampling: Sampling = Sampling()) -> Event:
    """What one answered round costs one client that answers it: no amplification, because it knows that it was asked."""
    if isinstance(mechanism, CentralGaussian):
        mechanism = replace(mechanism, adjacency="replace-one")
    event = mechanism.event(sampling)
    return replace(event, sampling=Sampling()) if isinstance(event, GaussianEvent) else event


def node_charge(mechanism: Mechanism, clients: int) -> tuple[Event, int]:
    """The event that an answer for so many hosted clients is charged with, and how often.

    Central: all the node's data together move the sum `clients` times as far as one client's, in every query of the round (by the
    triangle inequality the joint shift too), while the noise stays the same. Local: each client's report has noise of its own, so
    the reports compose; for Gaussian noise this is exactly one event with √clients times the shift.
    """
    require(clients >= 1, f"the number of clients is {clients}; it must be a positive whole number.")
    event = client_event(mechanism)
    if isinstance(event, GaussianEvent):
        return scaled(event, clients if event.setting == "central" else math.sqrt(clients)), 1
    return event, clients if isinstance(event, PrivUnitEvent) else 1


def beside(event: Event, earlier: Iterable[Event]) -> Event:
    """The event that pays for an answer to a round that this node answered before, with `earlier` as what was charged for it.

    The server may add all of a round's central answers into one sum with one noise, where their shifts add: μ₁ + μ₂ instead of
    √(μ₁² + μ₂²). With M charged so far, an answer of μ is therefore charged as √((M + μ)² − M²).
    """
    if not isinstance(event, GaussianEvent) or event.setting != "central":
        return event
    before = gdp.compose(e.mu for e in earlier if isinstance(e, GaussianEvent) and e.setting == "central")
    return event if before == 0 or event.mu == 0 else scaled(event, math.sqrt(1.0 + 2.0 * before / event.mu))


def scaled(event: GaussianEvent, factor: float) -> GaussianEvent:
    """The same queries with contributions `factor` times as large."""
    if factor == 1:
        return event
    queries = tuple(
        replace(
            q,
            bound=q.bound * factor,
            sensitivity=q.sensitivity * factor,
            diameter=None if q.diameter is None else q.diameter * factor,
        )
        for q in event.queries
    )
    return replace(
        event,
        queries=queries,
        joint_mu=None if event.joint_mu is None else event.joint_mu * factor,
        other_mu=None if event.other_mu is None else event.other_mu * factor,
    )


def strength(event: Event) -> float:
    """A number that orders events of one mechanism by what they cost: μ, the pure ε of a PrivUnit report, or infinity."""
    match event:
        case GaussianEvent():
            return event.mu
        case PrivUnitEvent():
            return event.epsilon
        case NonPrivateEvent():
            return math.inf


def is_split_as(event: Event, announced: Event, rounding: float) -> bool:
    """Whether no number of reports of `event` tells more than as many of `announced`, which an equal pure ε alone does not say:
    one part that holds all of it composes worse than several. Every part of a report's loss must be as small and as rare."""
    if not isinstance(event, PrivUnitEvent) or not isinstance(announced, PrivUnitEvent):
        return True
    parts = (
        (event.direction_epsilon, announced.direction_epsilon),
        (event.p, announced.p),
        (event.epsilon2, announced.epsilon2),
        (1.0 / (1.0 + event.k * math.exp(-event.epsilon2)), 1.0 / (1.0 + announced.k * math.exp(-announced.epsilon2))),
    )
    return event.cap <= 0.5 and all(part <= most * rounding for part, most in parts)


def total(charges: Charges, delta: float) -> float:
    """ε of everything that a node answered. Central and local rounds promise things about different observers, so their ε are
    added, with the δ shared between them."""
    settings: dict[str, list[tuple[Event, int]]] = {}
    for event, count in charges:
        settings.setdefault(event.setting, []).append((event, count))
    return sum(compose(part, delta / len(settings)).epsilon for part in settings.values())
