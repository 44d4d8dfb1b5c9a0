"""Mechanisms as JSON text, in which a server tells its clients what is run.

A client builds the same object from it, and with it the same noise and the same event for its own ledger. What comes over a network
is checked field by field, by the types that the mechanism's own class declares: a server may be wrong or worse.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields
from functools import lru_cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from dpfedexp.core.sums import WITHIN_CLIP, Vote, client_votes, within_clip_vote
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.base import Mechanism
from dpfedexp.mechanisms.registry import check_name, mechanism_class

_SMALLEST, _LARGEST = 1e-30, 1e30
"""Within these float32 clips exactly, and no square of a noise multiplier overflows or vanishes."""
_COUNTS, _COUNT = ("central-gaussian", "two-party", "two-party-one-sided"), "count_noise"
"""Mechanisms that can count the clients within the clip, and the field with the noise on the count."""
_MOST_VOTES = 16


def encode(mechanism: Mechanism) -> str:
    """
    >>> from dpfedexp.mechanisms import LocalGaussian
    >>> encode(LocalGaussian(0.3, 0.7))
    '{"kind":"local-gaussian","clip":0.3,"noise_multiplier":0.7,"numerator":null}'
    """
    values = text_fields({name: getattr(mechanism, name) for name in _types(mechanism.kind)}, mechanism.kind)
    finite = {name: None if value == math.inf else value for name, value in values.items()}
    return json.dumps({"kind": mechanism.kind, **finite}, separators=(",", ":"))


def decode(text: str) -> Mechanism:
    """The mechanism that `encode` wrote; a sentence for anything else."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        raise InputError("the mechanism is not valid JSON.") from None
    require(isinstance(values, dict), "the mechanism is not a JSON object.")
    kind = check_name(values.pop("kind", None), "the mechanism's kind")
    votes = _votes(values, kind)
    types = {name: declared for name, declared in _types(kind).items() if name != "votes"}
    if "question" in types:
        values.setdefault("question", "")
    require(
        set(values) == set(types), f"the mechanism {kind!r} has fields {sorted(values)}; it must have {sorted(types)}."
    )
    unclipped = values["clip"] is None and not mechanism_class(kind).is_private
    for name, value in values.items():
        if not (name == "clip" and unclipped):
            _check(name, value, types[name])
    if unclipped:
        values["clip"] = math.inf
    return mechanism_class(kind)(**values, **votes)


def text_fields(values: dict[str, Any], kind: str) -> dict[str, Any]:
    """The fields of a mechanism as texts and checkpoints hold them; the count of the adaptive clip has a field of its own."""
    if not values.get("question"):
        values.pop("question", None)
    votes: tuple[Vote, ...] | None = values.pop("votes", None)
    if votes is None:
        return values
    if kind in _COUNTS:
        values[_COUNT] = next((vote.noise for vote in votes if vote.name == WITHIN_CLIP), None)
    others = [[vote.name, vote.low, vote.high, vote.noise] for vote in client_votes(votes)]
    return {**values, "votes": others} if others else values


def _votes(values: dict[str, Any], kind: str) -> dict[str, tuple[Vote, ...]]:
    """The votes of such a text, which are taken out of it."""
    if "votes" not in _types(kind):
        return {}
    votes = []
    if kind in _COUNTS:
        require(_COUNT in values, f"the mechanism {kind!r} has no field {_COUNT!r}; it must be a number or null.")
        count = values.pop(_COUNT)
        _check(_COUNT, count, float | None)
        votes += [] if count is None else [within_clip_vote(float(count))]
    others = values.pop("votes", [])
    right = isinstance(others, list) and all(isinstance(vote, list) and len(vote) == 4 for vote in others)
    require(right, "the mechanism's votes are not a list of votes, each with its name, range and noise.")
    require(len(others) <= _MOST_VOTES, f"the mechanism has {len(others)} votes; it must have at most {_MOST_VOTES}.")
    for name, low, high, noise in others:
        for what, value in (("range", low), ("range", high), ("noise", noise)):
            number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST
            require(number, f"a vote's {what} holds {value!r}; it must be numbers of at most {_LARGEST:g}.")
        if kind in _COUNTS:
            _check("votes' noise", noise, float)
        votes.append(Vote(name, float(low), float(high), noise=float(noise)))
    return {"votes": tuple(votes)}


@lru_cache(maxsize=32)
def _types(kind: str) -> dict[str, Any]:
    """The fields of a mechanism as its class declares them."""
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
    number = isinstance(value, int | float) and not isinstance(value, bool)
    require(number and 0 < value < math.inf, f"the mechanism's {name} is {value!r}; it must be a positive number.")
    require(
        _SMALLEST <= value <= _LARGEST,
        f"the mechanism's {name} is {value!r}; it must be between {_SMALLEST:g} and {_LARGEST:g}.",
    )
    require(
        float in kinds or isinstance(value, int), f"the mechanism's {name} is {value!r}; it must be a whole number."
    )
