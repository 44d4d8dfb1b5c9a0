"""The mechanisms by name. Settings, messages, ledgers, guard files, the command line, the audit and the docs all read this table.

A new mechanism is a file that extends `Mechanism`, and a line here. Nothing is imported before a mechanism is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

from dpfedexp.errors import InputError, nearest

if TYPE_CHECKING:
    from dpfedexp.accounting.events import Event
    from dpfedexp.accounting.events.charges import RoundSettings
    from dpfedexp.mechanisms.base import Mechanism


@dataclass(frozen=True)
class Entry:
    """One mechanism.

    Args:
        home: its class, as "module:name".
        summary: one line for people who choose.
        charge: a function from `RoundSettings` to the event of a round, as "module:name", that needs no torch; None where the class
            itself is asked.
        tunes: what makes a round of it cost less: a noise multiplier, or the parts of its ε.
    """

    home: str
    summary: str
    charge: str | None = None
    tunes: Literal["noise_multiplier", "epsilons"] = "noise_multiplier"


_CHARGES = "dpfedexp.accounting.events.charges"

MECHANISMS: dict[str, Entry] = {
    "none": Entry(
        "dpfedexp.mechanisms.none:NoPrivacy", "no privacy: updates as they are", f"{_CHARGES}:non_private_round"
    ),
    "central-gaussian": Entry(
        "dpfedexp.mechanisms.central_gaussian:CentralGaussian",
        "a trusted server adds Gaussian noise to the sum",
        f"{_CHARGES}:central_gaussian_round",
    ),
    "two-party": Entry(
        "dpfedexp.mechanisms.two_party:TwoPartyGaussian",
        "two aggregators that do not trust each other add Gaussian noise to the sum, and neither sees an update",
        f"{_CHARGES}:two_party_round",
    ),
    "two-party-one-sided": Entry(
        "dpfedexp.mechanisms.two_party:OneSidedGaussian",
        "two aggregators of which only the helper adds noise: nothing is promised against the helper",
        f"{_CHARGES}:one_sided_round",
    ),
    "local-gaussian": Entry(
        "dpfedexp.mechanisms.local_gaussian:LocalGaussian",
        "every client adds Gaussian noise to its own update",
        f"{_CHARGES}:local_gaussian_round",
    ),
    "privunit": Entry(
        "dpfedexp.mechanisms.privunit:PrivUnit",
        "every client randomises its update's direction and norm (pure ε)",
        f"{_CHARGES}:privunit_round",
        tunes="epsilons",
    ),
}


def check_name(name: object, field: str = "mechanism") -> str:
    """The name, if there is such a mechanism; else a sentence with the nearest one."""
    if not isinstance(name, str) or name not in MECHANISMS:
        raise InputError(f"{field} is {name!r}, which does not exist.{nearest(str(name), MECHANISMS)}")
    return name


def mechanism_class(name: str) -> type[Mechanism]:
    """The class of a mechanism."""
    found: type[Mechanism] = _load(MECHANISMS[check_name(name)].home)
    return found


def round_event(name: str, settings: RoundSettings) -> Event:
    """What one round of a mechanism costs, from its settings alone."""
    entry = MECHANISMS[check_name(name)]
    event: Event = (mechanism_class(name).round_event if entry.charge is None else _load(entry.charge))(settings)
    return event


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
