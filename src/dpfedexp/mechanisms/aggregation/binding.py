"""What a sealed seed is bound to: the run, the round, the node, the nonce, the row's length, the clip and the whole mechanism.

The bytes below are HPKE's `info`: a seed opens only for whoever names the same ones. Every field has its length before it, so no
two bindings have the same bytes.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

from dpfedexp.core.noise.masks import MOST_WORDS
from dpfedexp.errors import require

PROTOCOL = b"dpfedexp two-party aggregation, version 1"
_NONCE = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True)
class Round:
    """What all the clients of one round have in common.

    Args:
        run: the run's name, which client and helper each know from their own node and not from the request.
        number: the round.
        nonce: 128 random bits of the server's, 32 hexadecimal digits; new for every round.
        columns: how many words a row has.
        clip: the radius C.
        mechanism: the mechanism as text (`mechanisms.text.encode`), which says the clip again, the noise and what is asked.
    """

    run: str
    number: int
    nonce: str
    columns: int
    clip: float
    mechanism: str

    def __post_init__(self) -> None:
        require(
            isinstance(self.nonce, str) and _NONCE.match(self.nonce) is not None,
            f"the round's nonce is {self.nonce!r}; it must be 32 hexadecimal digits.",
        )
        for name, value, most in (("number", self.number, 2**63), ("columns", self.columns, MOST_WORDS)):
            whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most
            require(whole, f"the round's {name} is {value!r}; it must be a whole number from 1 to {most}.")

    def info(self, node: int) -> bytes:
        """The bytes that the seed of one node is bound to."""
        require(0 <= node < 2**64, f"the node is {node}; it must be a number of 64 bits.")
        fields = (
            self.run.encode(),
            struct.pack(">Q", self.number),
            struct.pack(">Q", node),
            bytes.fromhex(self.nonce),
            struct.pack(">Q", self.columns),
            struct.pack(">d", self.clip),
            self.mechanism.encode(),
        )
        return b"".join(struct.pack(">I", len(field)) + field for field in (PROTOCOL, *fields))


def set_digest(round_: Round, seeds: Iterable[tuple[int, bytes]]) -> str:
    """One name for a round and a set of clients with their sealed seeds: what an answer says it is for."""
    digest = hashlib.sha256(round_.info(0))
    for node, sealed in sorted(seeds):
        digest.update(struct.pack(">QI", node, len(sealed)) + sealed)
    return digest.hexdigest()
