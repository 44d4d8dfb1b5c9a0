"""What makes a run the run that it is: everything its result depends on, by name.

A checkpoint carries these settings, so that it is continued only by the run that made it, and a run that it is refused to is told
what differs. The device, the trainer, the size of the chunks and the budget are left out: they change where a run stops or how it
rounds, not what it computes. So are the clients' data: a hash of them would tell whoever guesses a value whether it is right. They
are known by `data_tag`, whose key and whose value never leave the run's private folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from numbers import Integral, Real
from typing import Any

from dpfedexp.runs.checkpoints.earlier_names import RULE_NAMES, earlier_names

NamedValues = dict[str, Any]
_SHOWN = 6


def settings_hash(settings: NamedValues) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def settings_hashes(settings: NamedValues) -> list[str]:
    """The hashes by which a ledger may know these settings: as they are recorded today, and as they were before."""
    return [settings_hash(settings), settings_hash(earlier_names(settings))]


def differences(here: NamedValues, there: NamedValues) -> str:
    """'local.lr is 0.1 here and 0.2 there; …', empty where the two agree."""
    changed = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    shown = [f"{name} is {here.get(name)!r} here and {there.get(name)!r} there" for name in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        shown.append(f"{len(changed) - _SHOWN} more differ")
    return "; ".join(shown)


def flatten(value: Any, prefix: str = "") -> NamedValues:
    """Any value as dotted names with JSON values.

    A dataclass is named by its class, and its fields follow. A function is named as it was defined, and by its module too where it
    is not this library's own but has the name of one of its step-size rules: it must not be taken for that. A field that runs of
    before did not have is left out where it has its default, which is what they did.
    """
    if is_dataclass(value) and not isinstance(value, type):
        given = {field: getattr(value, field.name) for field in fields(value)}
        nested = {
            field.name: item
            for field, item in given.items()
            if not (field.metadata.get("added") and item == field.default)
        }
        return {prefix: type(value).__name__} | _join(nested, prefix)
    if isinstance(value, Mapping):
        return _join(value, prefix)
    if callable(value):
        return {prefix: _name(value)}
    if isinstance(value, list | tuple):
        return {prefix: [_plain(item) for item in value]}
    return {prefix: _plain(value)}


def _name(value: Any) -> str:
    name: str = getattr(value, "__qualname__", type(value).__qualname__)
    module = str(getattr(value, "__module__", ""))
    ours = module.partition(".")[0] == "dpfedexp"
    return name if ours or name not in RULE_NAMES else f"{module}.{name}"


def _plain(value: Any) -> Any:
    """A number of any library as Python's own; an infinite one as text, because JSON has none."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else str(float(value))
    return str(value)


def _join(values: Mapping[str, Any], prefix: str) -> NamedValues:
    joined: NamedValues = {}
    for name, value in values.items():
        joined |= flatten(value, f"{prefix}.{name}" if prefix else str(name))
    return joined
