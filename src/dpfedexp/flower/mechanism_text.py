"""A mechanism as text, so that the server can tell its clients exactly what is run.

A client builds the same object from it, and with it the same noise and the same event for its own ledger. What comes from the wire
is checked field by field: a server may be wrong or worse.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from typing import Any

from dpfedexp.errors import InputError, nearest, require
from dpfedexp.mechanisms import CentralGaussian, LocalGaussian, Mechanism, NoPrivacy, PrivUnit

KINDS: dict[str, type] = {
    "none": NoPrivacy,
    "central-gaussian": CentralGaussian,
    "local-gaussian": LocalGaussian,
    "privunit": PrivUnit,
}
_WORDS = {
    "adjacency": ("replace-one", "add-remove"),
    "numerator": ("free", "paper", "naive", None),
    "gamma": ("exact", "paper", "optimal"),
}
_OPTIONAL = ("scalar_multiplier", "count_noise")
_SMALLEST, _LARGEST = 1e-30, 1e30
"""Within these float32 clips exactly, and no square of a noise multiplier overflows or vanishes."""


def kind_of(mechanism: Mechanism) -> str:
    return next(name for name, kind in KINDS.items() if isinstance(mechanism, kind))


def is_local(mechanism: Mechanism) -> bool:
    """Whether a client's own report is the release, so that the server need not be trusted."""
    return isinstance(mechanism, LocalGaussian | PrivUnit)


def encode(mechanism: Mechanism) -> str:
    """
    >>> encode(LocalGaussian(0.3, 0.7))
    '{"kind":"local-gaussian","clip":0.3,"noise_multiplier":0.7,"numerator":null}'
    """
    kind = kind_of(mechanism)
    values = {field.name: getattr(mechanism, field.name) for field in fields(KINDS[kind])}
    finite = {name: None if value == math.inf else value for name, value in values.items()}
    return json.dumps({"kind": kind, **finite}, separators=(",", ":"))


def decode(text: str) -> Mechanism:
    """The mechanism that `encode` wrote; a sentence for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("the mechanism is not valid JSON.") from None
    require(isinstance(values, dict), "the mechanism is not a JSON object.")
    kind = values.pop("kind", None)
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"the mechanism's kind is {kind!r}, which does not exist.{nearest(str(kind), KINDS)}")
    names = {field.name for field in fields(KINDS[kind])}
    require(set(values) == names, f"the mechanism {kind!r} has fields {sorted(values)}; it must have {sorted(names)}.")
    for name, value in values.items():
        _check(kind, name, value)
    if values["clip"] is None:
        values["clip"] = math.inf
    if kind == "central-gaussian" and values["numerator"] == "paper":
        require(values["scalar_multiplier"] is not None, "the mechanism's scalar_multiplier is missing.")
    return KINDS[kind](**values)


def _check(kind: str, name: str, value: Any) -> None:
    if name in _WORDS:
        require(value in _WORDS[name], f"the mechanism's {name} is {value!r}, which does not exist.")
        return
    if value is None and (name in _OPTIONAL or (name == "clip" and kind == "none")):
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number and 0 < value < math.inf, f"the mechanism's {name} is {value!r}; it must be a positive number.")
    require(
        _SMALLEST <= value <= _LARGEST,
        f"the mechanism's {name} is {value!r}; it must be between {_SMALLEST:g} and {_LARGEST:g}.",
    )
    require(name != "dimension" or isinstance(value, int), f"the mechanism's dimension is {value!r}; it must be whole.")
