"""The wire protocol of two aggregators: what a client binds, seals and sends, and what the second aggregator answers.

A seed is bound to the run, the round, the node, the nonce, the row's length, the clip and the whole mechanism: these bytes are
HPKE's `info`, and a seed opens only for the same values. It is sealed under the helper's public key by HPKE (RFC 9180)
of the `cryptography` package, and nothing else: DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305, in base mode. Base mode
does not say who sealed; a client's identity is the network's to check.

Formal guarantee: an answer of the helper holds noise of full size that only the helper knows, and is on the books, durably, before
its noise is drawn. There is at most one answer per round of a run and per nonce, for any set of clients; rounds
of a run only go up. The masks of fewer clients than its minimum are never added. What the noise costs does not depend on the
set, even if the server invents clients: one client moves the sum by at most 2C.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpfedexp.core.noise import MOST_WORDS, SEED_BYTES, Noise, Words, expand, fresh_seed, from_words, hide, to_words
from dpfedexp.errors import InputError, require
from dpfedexp.mechanisms.base import Release
from dpfedexp.mechanisms.serialization import decode, encode
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

PROTOCOL = b"dpfedexp two-party aggregation, version 1"
_NONCE = re.compile(r"[0-9a-f]{32}\Z")
KEY_BYTES = 32
SEALED_BYTES = 32 + SEED_BYTES + 16
"""An encapsulated key, the seed, and the tag."""
FEWEST = 2
"""No set is smaller than this: the sum of one client is its update."""


@dataclass(frozen=True)
class RoundBinding:
    """What all the clients of one round have in common.

    Args:
        run: the run's name, which client and helper each know from their own node and not from the request.
        number: the round.
        nonce: 128 random bits of the server's, 32 hexadecimal digits; new for every round.
        columns: how many words a row has.
        clip: the radius C.
        mechanism: the mechanism as text (`mechanisms.serialization.encode`), which says the clip again, the noise and what is
            asked.
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
        # Votes before the first round have the number 0.
        for name, value, least, most in (("number", self.number, 0, 2**63), ("columns", self.columns, 1, MOST_WORDS)):
            whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            require(whole, f"the round's {name} is {value!r}; it must be a whole number from {least} to {most}.")

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


def set_digest(round_: RoundBinding, seeds: Iterable[tuple[int, bytes]]) -> str:
    """One name for a round and a set of clients with their sealed seeds: what an answer says it is for."""
    digest = hashlib.sha256(round_.info(0))
    for node, sealed in sorted(seeds):
        digest.update(struct.pack(">QI", node, len(sealed)) + sealed)
    return digest.hexdigest()


def new_key(path: Path | str) -> str:
    """Write a new private key, for its owner alone, and return the public key that sites pin, as hexadecimal digits."""
    x25519, _ = _primitives()
    private = x25519.X25519PrivateKey.generate()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{str(path)!r} already exists; keys are not overwritten: choose another name.") from None
    with os.fdopen(file, "w", encoding="ascii") as out:
        out.write(private.private_bytes_raw().hex() + "\n")
        out.flush()
        os.fsync(out.fileno())
    return str(private.public_key().public_bytes_raw().hex())


class PrivateKey:
    """The helper's key. Its text never shows the key itself."""

    def __init__(self, raw: bytes) -> None:
        require(len(raw) == KEY_BYTES, f"the helper's private key has {len(raw)} bytes; it must have {KEY_BYTES}.")
        x25519, self._suite = _primitives()
        self._key = x25519.X25519PrivateKey.from_private_bytes(raw)

    @staticmethod
    def load(path: Path | str) -> PrivateKey:
        """The key in a file of `new_key`."""
        try:
            return PrivateKey(bytes.fromhex(Path(path).read_text(encoding="ascii").strip()))
        except OSError as error:
            raise InputError(f"the helper's key file {str(path)!r} can't be read: {error.strerror}.") from None
        except ValueError:
            raise InputError(f"the helper's key file {str(path)!r} does not hold 64 hexadecimal digits.") from None

    @property
    def public(self) -> str:
        return str(self._key.public_key().public_bytes_raw().hex())

    def open(self, sealed: bytes, info: bytes) -> bytes | None:
        """The seed, or None where it was sealed to another key or binding, or was changed."""
        from cryptography.exceptions import InvalidTag

        if len(sealed) != SEALED_BYTES:
            return None
        try:
            seed: bytes = self._suite.decrypt(sealed, self._key, info=info)
        except (InvalidTag, ValueError):
            return None
        return seed if len(seed) == SEED_BYTES else None


def check_public(text: object, name: str = "helper_key") -> str:
    right = isinstance(text, str) and len(text) == 2 * KEY_BYTES and all(c in "0123456789abcdefABCDEF" for c in text)
    require(right, f"{name} is {text!r}; it must be the helper's public key, 64 hexadecimal digits.")
    return str(text).lower()


def seal(seed: bytes, public: str, info: bytes) -> bytes:
    """The seed so that only the helper can read it, and only under the same binding."""
    x25519, suite = _primitives()
    try:
        key = x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(check_public(public)))
        return bytes(suite.encrypt(seed, key, info=info))
    except ValueError:  # such as a point of small order
        raise InputError("helper_key is no usable X25519 public key; ask the helper's operator for it again.") from None


def _primitives() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
    except ModuleNotFoundError:
        raise InputError(
            "sealing seeds needs cryptography 50 or newer, which has HPKE; install it with: pip install 'dpfedexp[flower]'."
        ) from None
    return x25519, Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)


@dataclass(frozen=True)
class MaskedRow:
    """What a client sends to the server: the row minus its mask, mod 2⁶⁴, and the mask's seed, sealed for the helper."""

    words: Words
    sealed: bytes


def mask_row(row: Words, round_: RoundBinding, node: int, helper_key: str) -> MaskedRow:
    """The two parts of one row, with a seed that exists nowhere else and is used once."""
    require(len(row) == round_.columns, f"the row has {len(row)} words; the round has {round_.columns}.")
    seed = fresh_seed()
    return MaskedRow(hide(row, seed), seal(seed, helper_key, round_.info(node)))


AdmitAnswer = Callable[[RoundBinding, TwoPartyGaussian], None]
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
class HelperAnswer:
    """The sum of the masks and the helper's noise, mod 2⁶⁴, and the round and set of clients that it is for."""

    words: Words
    digest: str


@dataclass(frozen=True)
class Helper:
    """A second aggregator.

    Args:
        key: its private key; sites pin the public one.
        min_clients: the fewest clients whose masks it adds.
        admit: admits and charges an answer.
        noise: makes one fresh source of noise per purpose.
    """

    key: PrivateKey
    min_clients: int
    admit: AdmitAnswer
    noise: Callable[[], Noise]

    def answer(self, round_: RoundBinding, seeds: list[tuple[int, bytes]]) -> HelperAnswer:
        """The answer to a round for these clients, charged; raises `InputError` with the reason for anything else."""
        mechanism = _mechanism(round_)
        nodes = [node for node, _ in seeds]
        require(len(set(nodes)) == len(nodes), "a client is in the set twice, so its update would be counted twice.")
        fewest = max(FEWEST, self.min_clients)
        require(
            len(nodes) >= fewest,
            f"the set is too small: this helper adds no fewer than {fewest} clients, because the sum of a few tells about each.",
        )
        mechanism.check_headroom(len(nodes))
        opened = [(node, self.key.open(sealed, round_.info(node))) for node, sealed in seeds]
        closed = [node for node, seed in opened if seed is None]
        if closed:
            raise BadSeeds(closed)
        known = [seed for _, seed in opened if seed is not None]
        require(len(set(known)) == len(known), "two clients have the same seed, which no honest client has.")
        self.admit(round_, mechanism)
        drawn = mechanism.noise_units(round_.columns, "helper", self.noise(), self.noise())
        total = to_words(drawn).copy()
        for seed in known:
            total += expand(seed, round_.columns)
        return HelperAnswer(total, set_digest(round_, seeds))


def _mechanism(round_: RoundBinding) -> TwoPartyGaussian:
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


def server_release(
    mechanism: TwoPartyGaussian, words: list[Words], answer: Words, denominator: float, noise: Callable[[], Noise]
) -> Release:
    """The server's half of a round: the sum without masks, with noise of its own where the mechanism has two sides."""
    total = unmask_sum(words, answer)
    if "server" in mechanism.sides:
        total += to_words(mechanism.noise_units(len(answer), "server", noise(), noise()))
    return mechanism.decode(from_words(total), len(words), denominator)


def unmask_sum(words: list[Words], answer: Words) -> Words:
    """What the server learns: Σ of the rows and the helper's noise, mod 2⁶⁴."""
    total = np.array(answer, dtype=np.uint64)
    for row in words:
        total += row
    return total
