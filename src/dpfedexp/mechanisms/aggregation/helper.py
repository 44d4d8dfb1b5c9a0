"""The second aggregator: it opens the seeds of a round's clients, and answers with the sum of their masks and noise.

Formal guarantee: an answer holds noise of full size that only the helper knows, and is on the books, durably, before its noise is
drawn. There is at most one answer to a round of a run and to a nonce, whatever set of clients it is asked for; rounds of a run
only go up. The masks of fewer clients than its floor are never added. What the noise costs does not depend on the set: whoever is
in it, and whoever else the server invented, one client moves the sum by at most 2C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from dpfedexp.core.noise import Noise
from dpfedexp.core.noise.masks import Words, expand, to_words
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.aggregation.binding import Round, set_digest
from dpfedexp.mechanisms.aggregation.sealing import PrivateKey
from dpfedexp.mechanisms.text import decode, encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

FEWEST = 2
"""No floor is below this: the sum of one client is its update."""

Books = Callable[[Round, TwoPartyGaussian], None]
"""Returns when the answer to a round is within the helper's limits and charged on disk; raises `InputError` otherwise."""


class BadSeeds(InputError):
    """Some of the seeds don't open under this round's binding. Nothing was charged, and the others may be asked for again."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(
            f"the seeds of {len(nodes)} clients don't open: they were sealed for another helper, run, round, node, nonce, row "
            "length, clip or mechanism, or were changed on the way."
        )
        self.nodes = nodes


@dataclass(frozen=True)
class Answer:
    """The sum of the masks and the helper's noise, mod 2⁶⁴, and the round and set of clients that it is for."""

    words: Words
    digest: str


@dataclass(frozen=True)
class Helper:
    """A second aggregator.

    Args:
        key: its private key; sites pin the public one.
        min_clients: the fewest clients whose masks it adds.
        books: admits and charges an answer.
        noise: makes one fresh source of noise per purpose.
    """

    key: PrivateKey
    min_clients: int
    books: Books
    noise: Callable[[], Noise]

    def answer(self, round_: Round, seeds: list[tuple[int, bytes]]) -> Answer:
        """The answer to a round for these clients, charged; raises `InputError` with the reason for anything else."""
        mechanism = _mechanism(round_)
        nodes = [node for node, _ in seeds]
        require(len(set(nodes)) == len(nodes), "a client is in the set twice, so its update would be counted twice.")
        floor = max(FEWEST, self.min_clients)
        require(
            len(nodes) >= floor,
            f"the set has {len(nodes)} clients, and this helper adds no fewer than {floor}: the sum of a few tells about each.",
        )
        mechanism.check_headroom(len(nodes))
        opened = [(node, self.key.open(sealed, round_.info(node))) for node, sealed in seeds]
        closed = [node for node, seed in opened if seed is None]
        if closed:
            raise BadSeeds(closed)
        known = [seed for _, seed in opened if seed is not None]
        require(len(set(known)) == len(known), "two clients have the same seed, which no honest client has.")
        self.books(round_, mechanism)
        drawn = mechanism.noise_units(round_.columns, "helper", self.noise(), self.noise())
        total = to_words(drawn).copy()
        for seed in known:
            total += expand(seed, round_.columns)
        return Answer(total, set_digest(round_, seeds))


def _mechanism(round_: Round) -> TwoPartyGaussian:
    """The round's mechanism, if it is one of two aggregators and the text is the only one that says it."""
    mechanism = decode(round_.mechanism)
    if not isinstance(mechanism, TwoPartyGaussian):
        raise InputError(
            f"mechanism {mechanism.kind!r} has no helper; it must be 'two-party' or 'two-party-one-sided'."
        )
    require(encode(mechanism) == round_.mechanism, "the mechanism is not written as this library writes it.")
    require(mechanism.adjacency == "replace-one", "the mechanism's adjacency must be 'replace-one'.")
    require(mechanism.clip == round_.clip, f"the clip is {round_.clip}, and the mechanism says {mechanism.clip}.")
    least = mechanism.columns(1)
    require(round_.columns >= least, f"a row has {round_.columns} words; this mechanism needs at least {least}.")
    return mechanism


def unmasked(words: list[Words], answer: Words, noise: Words | None = None) -> Words:
    """What the server learns: Σ of the rows and the helper's noise, and its own noise where it adds any, mod 2⁶⁴."""
    total = np.array(answer, dtype=np.uint64)
    for row in words:
        total += row
    return total if noise is None else total + noise
