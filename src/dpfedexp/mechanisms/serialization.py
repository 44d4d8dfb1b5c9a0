"""Mechanisms as JSON text, which a server sends to its clients.

A client builds the same object from the text, with the same noise and the same event for its own ledger. Every field is checked
against the types that the class of the mechanism declares, because the server may be wrong or malicious.
"""

import json
import math
from dataclasses import fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dpfedexp.core.sums import Vote
from dpfedexp.errors import InputError, is_number, require
from dpfedexp.mechanisms.base import Mechanism
from dpfedexp.mechanisms.registry import check_name, mechanism_class

_SMALLEST, _LARGEST = 1e-30, 1e30
"""The range of numbers in which float32 clips exactly, and no square of a noise multiplier overflows or underflows."""
_MOST_VOTES = 16


def encode(mechanism: Mechanism) -> str:
    """Return the mechanism as JSON text.
    >>> from dpfedexp.mechanisms import LocalGaussian
    >>> encode(LocalGaussian(0.3, 0.7))
    '{"kind":"local-gaussian","clip":0.3,"noise_multiplier":0.7,"numerator":null}'
    """
    values = text_fields({name: getattr(mechanism, name) for name in _types(mechanism.kind)})
    finite = {name: None if value == math.inf else value for name, value in values.items()}
    return json.dumps({"kind": mechanism.kind, **finite}, separators=(",", ":"))


def decode(text: str) -> Mechanism:
    """Read a mechanism from the output of `encode`; raise `InputError` for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("the mechanism is not valid JSON.") from None
    require(isinstance(values, dict), "the mechanism is not a JSON object.")
    kind = check_name(values.pop("kind", None), "the mechanism's kind")
    types, declared = _types(kind), mechanism_class(kind)
    require(
        set(values) == set(types), f"the mechanism {kind!r} has fields {sorted(values)}; it must have {sorted(types)}."
    )
    for name, value in values.items():
        if name == "votes":
            values[name] = _votes(value, declared.is_private)
        elif name == "clip" and value is None and not declared.is_private:
            values[name] = math.inf
        else:
            _check(name, value, types[name])
    return declared(**values)


def text_fields(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a mechanism in the form of messages and checkpoints: votes become lists."""
    votes: tuple[Vote, ...] | None = values.get("votes")
    if votes is None:
        return values
    return {**values, "votes": [[vote.name, vote.low, vote.high, vote.noise] for vote in votes]}


def _votes(listed: Any, private: bool) -> tuple[Vote, ...]:
    right = isinstance(listed, list) and all(isinstance(vote, list) and len(vote) == 4 for vote in listed)
    require(right, "the mechanism's votes are not a list of votes, each with its name, range and noise.")
    require(len(listed) <= _MOST_VOTES, f"the mechanism has {len(listed)} votes; it must have at most {_MOST_VOTES}.")
    votes = []
    for name, low, high, noise in listed:
        for what, value in (("range", low), ("range", high), ("noise", noise)):
            number = is_number(value) and abs(value) <= _LARGEST
            require(number, f"a vote's {what} holds {value!r}; it must be numbers of at most {_LARGEST:g}.")
        if private:
            _check("votes' noise", noise, float)
        votes.append(Vote(name, float(low), float(high), noise=float(noise)))
    return tuple(votes)


@lru_cache(maxsize=32)
def _types(kind: str) -> dict[str, Any]:
    declared = mechanism_class(kind)
    hints = get_type_hints(declared)
    return {field.name: hints[field.name] for field in fields(declared)}  # type: ignore[arg-type]


def _check(name: str, value: Any, kind: Any) -> None:
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    if value is None and NoneType in kinds:
        return
    words = [word for one in kinds if get_origin(one) is Literal for word in get_args(one)]
    if words:
        require(
            isinstance(value, str) and value in words, f"the mechanism's {name} is {value!r}, which does not exist."
        )
        return
    if str in kinds:
        right = isinstance(value, str) and value.isprintable() and len(value) <= 60
        require(right, f"the mechanism's {name} is {value!r}; it must be text of at most 60 printable characters.")
        return
    if bool in kinds:
        require(isinstance(value, bool), f"the mechanism's {name} is {value!r}; it must be true or false.")
        return
    positive = is_number(value) and 0 < value < math.inf
    require(positive, f"the mechanism's {name} is {value!r}; it must be a positive number.")
    require(
        _SMALLEST <= value <= _LARGEST,
        f"the mechanism's {name} is {value!r}; it must be between {_SMALLEST:g} and {_LARGEST:g}.",
    )
    require(
        float in kinds or isinstance(value, int), f"the mechanism's {name} is {value!r}; it must be a whole number."
    )
