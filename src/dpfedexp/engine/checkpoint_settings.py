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

NamedValues = dict[str, Any]
_SHOWN = 6


def settings_hash(settings: NamedValues) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def differences(here: NamedValues, there: NamedValues) -> str:
    """'local.lr is 0.1 here and 0.2 there; …', empty where the two agree."""
    changed = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    shown = [f"{name} is {here.get(name)!r} here and {there.get(name)!r} there" for name in changed[:_SHOWN]]
    if len(changed) > _SHOWN:
        shown.append(f"{len(changed) - _SHOWN} more differ")
    return "; ".join(shown)


def flatten(value: Any, prefix: str = "") -> NamedValues:
    """Any value as dotted names with JSON values.

    A dataclass is named by its class, and its fields follow. A function is named as it was defined. One of this library's has
    `dpfedexp.` before its name, so that no other function is taken for it.
    """
    if is_dataclass(value) and not isinstance(value, type):
        nested = {field.name: getattr(value, field.name) for field in fields(value)}
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
    library = str(getattr(value, "__module__", "")).partition(".")[0]
    return f"dpfedexp.{name}" if library == "dpfedexp" else name


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
