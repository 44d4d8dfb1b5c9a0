"""Settings of runs that earlier versions began, by the names of today.

A checkpoint and the first line of a ledger say what their run is by the names of their time. A name that changes is entered here,
and whoever resumes a run of before does not notice. The names of step-size rules were those of private functions.
"""

from __future__ import annotations

from typing import Any

NamedValues = dict[str, Any]

RENAMED: dict[str, dict[Any, Any]] = {
    "algorithm.rule": {
        "_one": "one",
        "_fedexp": "fedexp",
        "_free": "free",
        "_cdp": "cdp",
        "_ldp_gaussian": "ldp_gaussian",
        "_ldp_privunit": "ldp_privunit",
        "_naive": "naive",
    },
}
"""Setting → its earlier value → the same value today. No two earlier values may become one."""

ADDED: NamedValues = {}
"""Settings that were not recorded before, and the value that every run had then."""

RULE_NAMES = frozenset(name for pair in RENAMED["algorithm.rule"].items() for name in pair)

SERVER_STEP = "server_step"
"""What a server optimiser's direction is multiplied with. Momentum and Adam were not multiplied with η_g before, which is another
run wherever the rule gives another η_g than 1."""


def present_names(settings: NamedValues) -> NamedValues:
    """The settings as a run of today records them; those of a run of today are left as they are."""
    named = {name: _renamed(name, value, RENAMED) for name, value in (ADDED | settings).items()}
    if SERVER_STEP not in named and named.get("algorithm.server") in ("Momentum", "Adam"):
        named[SERVER_STEP] = "eta_g" if named.get("algorithm.rule") == "one" else "1"
    return named


def earlier_names(settings: NamedValues) -> NamedValues:
    """The settings as a run of before would have recorded them: what the hash in the first line of its ledger was made from."""
    back = {name: {new: old for old, new in values.items()} for name, values in RENAMED.items()}
    new = {name for name, value in ADDED.items() if name in settings and settings[name] == value} | {SERVER_STEP}
    return {name: _renamed(name, value, back) for name, value in settings.items() if name not in new}


def _renamed(name: str, value: Any, names: dict[str, dict[Any, Any]]) -> Any:
    return names[name].get(value, value) if name in names and isinstance(value, str) else value
