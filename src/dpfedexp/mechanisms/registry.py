"""The table of mechanisms by name, used by settings, messages, ledgers, guard files, the command line, the audit and the docs.

To add a mechanism, write a module with a subclass of `Mechanism`, and add a line to this table. Modules are imported on first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Literal

from dpfedexp.errors import InputError, nearest

if TYPE_CHECKING:
    from dpfedexp.accounting.events import Event, RoundSettings
    from dpfedexp.mechanisms.base import Mechanism


@dataclass(frozen=True)
class Entry:
    """One mechanism of the table.

    Args:
        home: its class, as "module:name"; a leading dot stands for this package.
        summary: one line for people who choose a mechanism.
        tunes: the setting that determines the cost of a round: the noise multiplier, or the parts of PrivUnit's ε.
    """

    home: str
    summary: str
    tunes: Literal["noise_multiplier", "epsilons"] = "noise_multiplier"


MECHANISMS: dict[str, Entry] = {
    "none": Entry(".base:NoPrivacy", "no privacy: updates as they are"),
    "central-gaussian": Entry(".central_gaussian:CentralGaussian", "a trusted server adds Gaussian noise to the sum"),
    "two-party": Entry(
        ".two_party:TwoPartyGaussian",
        "two aggregators that do not trust each other add Gaussian noise to the sum, and neither sees an update",
    ),
    "two-party-one-sided": Entry(
        ".two_party:OneSidedGaussian",
        "two aggregators of which only the helper adds noise: nothing is promised against the helper",
    ),
    "local-gaussian": Entry(".local_gaussian:LocalGaussian", "every client adds Gaussian noise to its own update"),
    "privunit": Entry(
        ".privunit:PrivUnit",
        "every client randomizes its update's direction and norm (pure ε)",
        tunes="epsilons",
    ),
}


def check_name(name: object, field: str = "mechanism") -> str:
    """Return the name if the mechanism exists; else raise `InputError` with the nearest name."""
    if not isinstance(name, str) or name not in MECHANISMS:
        raise InputError(f"{field} is {name!r}, which does not exist.{nearest(str(name), MECHANISMS)}")
    return name


def mechanism_class(name: str) -> type[Mechanism]:
    """Return the class of a mechanism by its name."""
    module, _, attribute = MECHANISMS[check_name(name)].home.partition(":")
    return getattr(import_module(module, __package__), attribute)  # type: ignore[no-any-return]


def round_event(name: str, settings: RoundSettings) -> Event:
    """Return the event of one round of a mechanism from its settings; the library's own mechanisms are not imported for it."""
    from dpfedexp.accounting.events import round_event

    event = round_event(check_name(name), settings)
    return mechanism_class(name).round_event(settings) if event is None else event
