"""What a round did, in numbers that any accountant can interpret.

An event is a frozen value made by a mechanism from its own fields. Accounting knows mechanisms only by these events; the ledger
is a list of them.

There are three families. Gaussian events compose by their shift in units of the noise. Report events compose by the law of their
privacy loss: PrivUnit's is exact, and `PureEvent` is for any other release that is ε-DP by itself. The third promises nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

from dpfedexp.accounting.events.gaussian import (
    ADJACENCIES,
    Adjacency,
    BesideSum,
    Family,
    GaussianEvent,
    Query,
    Sampling,
)
from dpfedexp.accounting.events.reports import PrivUnitEvent, PureEvent
from dpfedexp.errors import InputError, checked, require

__all__ = [
    "ADJACENCIES",
    "Adjacency",
    "BesideSum",
    "Event",
    "GaussianEvent",
    "NonPrivateEvent",
    "PrivUnitEvent",
    "PureEvent",
    "Query",
    "ReportEvent",
    "Sampling",
    "from_json",
    "to_json",
]


@checked
@dataclass(frozen=True)
class NonPrivateEvent:
    """A round that promises nothing."""

    family: ClassVar[Family] = "none"

    setting: Literal["none"] = "none"
    adjacency: Adjacency = "replace-one"

    @property
    def sampling(self) -> None:
        return None

    def unsampled(self) -> NonPrivateEvent:
        return self

    def under(self, adjacency: Adjacency) -> NonPrivateEvent:
        return self

    def hosted(self, clients: int) -> tuple[NonPrivateEvent, int]:
        return self, 1

    def beside(self, earlier: Iterable[object]) -> NonPrivateEvent:
        return self

    def tells_no_more_than(self, other: object, rounding: float) -> bool:
        return isinstance(other, NonPrivateEvent)

    @property
    def strength(self) -> float:
        return math.inf

    @property
    def nominal(self) -> None:
        return None


ReportEvent = PrivUnitEvent | PureEvent
Event = GaussianEvent | PrivUnitEvent | PureEvent | NonPrivateEvent
_KINDS: dict[str, type[GaussianEvent | PrivUnitEvent | PureEvent | NonPrivateEvent]] = {
    kind.__name__: kind for kind in (GaussianEvent, PrivUnitEvent, PureEvent, NonPrivateEvent)
}


def to_json(event: Event) -> dict[str, Any]:
    return {"kind": type(event).__name__, **asdict(event)}


def from_json(data: dict[str, Any]) -> Event:
    """The event that `to_json` wrote; a clear error for anything else."""
    fields = dict(data)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise InputError(f"event kind is {kind!r}; it must be one of {', '.join(_KINDS)}.")
    try:
        if _KINDS[kind] is GaussianEvent:
            fields["queries"] = tuple(Query(**q) for q in fields["queries"])
            fields["sampling"] = Sampling(**fields["sampling"])
        elif fields.get("sampling") is not None:
            fields["sampling"] = Sampling(**fields["sampling"])
        event = _KINDS[kind](**fields)
        if not isinstance(event, NonPrivateEvent):
            _check_optional(event)
        return event
    except (TypeError, KeyError, AttributeError) as error:
        raise InputError(f"an event of kind {kind!r} has wrong fields: {error}.") from None


def _check_optional(event: GaussianEvent | ReportEvent) -> None:
    """Whether the fields that a ledger may leave out are of the right type."""
    require(type(event.attained) is bool, f"attained is {event.attained!r}; it must be true or false.")
    if isinstance(event, GaussianEvent):
        require(
            event.beside_sum in get_args(BesideSum),
            f"beside_sum is {event.beside_sum!r}; it must be one of {', '.join(get_args(BesideSum))}.",
        )
        numbers = {"other_mu": event.other_mu, **{f"diameter of {q.name}": q.diameter for q in event.queries}}
        for name, value in numbers.items():
            right = value is None or (type(value) in (int, float) and value >= 0.0)
            require(right, f"{name} is {value!r}; it must be a number, zero or more.")
