"""A client's side: its row under a mask for the server, and the seed of the mask for the helper."""

from __future__ import annotations

from dataclasses import dataclass

from dpfedexp.core.noise.masks import Words, fresh_seed, hide
from dpfedexp.errors import require
from dpfedexp.mechanisms.aggregation.binding import Round
from dpfedexp.mechanisms.aggregation.sealing import seal


@dataclass(frozen=True)
class Masked:
    """What a client sends: all of it to the server, which hands `sealed` on.

    Args:
        words: the row minus its mask, mod 2⁶⁴.
        sealed: the seed of the mask under the helper's key.
    """

    words: Words
    sealed: bytes


def masked(row: Words, round_: Round, node: int, helper_key: str) -> Masked:
    """The two parts of one row, with a seed that exists nowhere else and is used once."""
    require(len(row) == round_.columns, f"the row has {len(row)} words; the round has {round_.columns}.")
    seed = fresh_seed()
    return Masked(hide(row, seed), seal(seed, helper_key, round_.info(node)))
