"""The table of mechanisms by name; modules are imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING

from dpfedexp.errors import check_known

if TYPE_CHECKING:
    from dpfedexp.accounting.events import Event, RoundSettings
    from dpfedexp.mechanisms.base import Mechanism


MECHANISMS = {
    "none": ".base:NoPrivacy",
    "central-gaussian": ".central_gaussian:CentralGaussian",
    "two-party": ".two_party:TwoPartyGaussian",
    "two-party-one-sided": ".two_party:OneSidedGaussian",
    "local-gaussian": ".local_gaussian:LocalGaussian",
    "privunit": ".privunit:PrivUnit",
}
"""Name → class, as "module:name"; a leading dot stands for this package."""


def check_name(name: object, field: str = "mechanism") -> str:
    """Return the name if the mechanism exists; else raise `InputError` with the nearest name."""
    check_known(field, name, MECHANISMS)
    return str(name)


def mechanism_class(name: str) -> "type[Mechanism]":
    """Return the class of a mechanism by its name."""
    module, _, attribute = MECHANISMS[check_name(name)].partition(":")
    return getattr(import_module(module, __package__), attribute)  # type: ignore[no-any-return]


def round_event(name: str, settings: "RoundSettings") -> "Event":
    """Return the event of one round of a mechanism from its settings; the library's own mechanisms are not imported for it."""
    from dpfedexp.accounting.events import round_event

    event = round_event(check_name(name), settings)
    return mechanism_class(name).round_event(settings) if event is None else event
