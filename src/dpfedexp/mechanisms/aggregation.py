"""The wire protocol of two-party aggregation: what a client seals and sends, and what the second aggregator (the helper) answers.

The seed of a mask is encrypted (sealed) to the helper's public key by HPKE (RFC 9180) of the `cryptography` package, with
DHKEM(X25519, HKDF-SHA256), HKDF-SHA256 and ChaCha20-Poly1305 in base mode. HPKE's `info` binds it to the run, the round, the node,
the nonce, the row's length, the clip and the mechanism: it can be decrypted only with the same values. Base mode does not
authenticate the sender; the network layer must check the identity of a client.

Formal guarantee: an answer of the helper contains noise of full size that only the helper knows, and is charged on disk before the
noise is drawn. There is at most one answer per round of a run and per nonce, for any set of clients; round numbers of a run only
increase. In a tournament the answer to a round has a sum for each candidate, over disjoint sets of clients, and votes on a rate or
a clip have an answer for each candidate. The helper never adds the masks of fewer clients than its minimum. The cost does not
depend on the sets of clients, even if the server invents clients: one client changes one sum, by at most 2C.
"""

import hashlib
import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

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
"""The length of a sealed seed: an encapsulated key, the seed, and the authentication tag."""
FEWEST = 2
"""The smallest set of clients that is ever added: the sum of one client would be its update."""


@dataclass(frozen=True)
class RoundBinding:
    """The values of a round to which the seeds of all its clients are bound.

    Args:
        run: the name of the run, which client and helper each know from their own node and not from the request.
        number: the number of the round.
        nonce: 128 random bits from the server, as 32 hexadecimal digits; new for every round.
        columns: the number of words in a row.
        clip: the radius C.
        mechanism: the mechanism as text (`mechanisms.serialization.encode`), with the clip, the noise and the question, if any,
            that clients answer.
        candidate: the number of the candidate of a tournament that is asked about; 0 without a tournament.
    """

    run: str
    number: int
    nonce: str
    columns: int
    clip: float
    mechanism: str
    candidate: int = 0

    def __post_init__(self) -> None:
        require(
            isinstance(self.nonce, str) and _NONCE.match(self.nonce) is not None,
            f"the round's nonce is {self.nonce!r}; it must be 32 hexadecimal digits.",
        )
        # Votes before the first round have the number 0.
        counts = {"number": (0, 2**63), "columns": (1, MOST_WORDS), "candidate": (0, 2**31)}
        for name, (least, most) in counts.items():
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
            require(whole, f"the round's {name} is {value!r}; it must be a whole number from {least} to {most}.")

    def info(self, node: int) -> bytes:
        """Return the bytes to which the seed of a node is bound (HPKE's `info`)."""
        require(0 <= node < 2**64, f"the node is {node}; it must be a number of 64 bits.")
        fields = (
            self.run.encode(),
            struct.pack(">Q", self.number),
            struct.pack(">Q", node),
            bytes.fromhex(self.nonce),
            struct.pack(">Q", self.columns),
            struct.pack(">d", self.clip),
            self.mechanism.encode(),
            struct.pack(">Q", self.candidate),
        )
        return b"".join(struct.pack(">I", len(field)) + field for field in (PROTOCOL, *fields))


def set_digest(round_: RoundBinding, seeds: Iterable[tuple[int, bytes]]) -> str:
    """Return the hash of a round and its clients with their sealed seeds; an answer names the set that it is for by this hash."""
    digest = hashlib.sha256(round_.info(0))
    for node, sealed in sorted(seeds):
        digest.update(struct.pack(">QI", node, len(sealed)) + sealed)
    return digest.hexdigest()


def new_key(path: Path | str) -> str:
    """Write a new private key that only its owner can read; return the public key, which sites pin, as hexadecimal digits."""
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
    """The private key of the helper. Its `repr` does not show the key."""

    def __init__(self, raw: bytes) -> None:
        require(len(raw) == KEY_BYTES, f"the helper's private key has {len(raw)} bytes; it must have {KEY_BYTES}.")
        x25519, self._suite = _primitives()
        self._key = x25519.X25519PrivateKey.from_private_bytes(raw)

    @classmethod
    def load(cls, path: Path | str) -> Self:
        try:
            return cls(bytes.fromhex(Path(path).read_text(encoding="ascii").strip()))
        except OSError as error:
            raise InputError(f"the helper's key file {str(path)!r} can't be read: {error.strerror}.") from None
        except ValueError:
            raise InputError(f"the helper's key file {str(path)!r} does not hold 64 hexadecimal digits.") from None

    @property
    def public(self) -> str:
        return str(self._key.public_key().public_bytes_raw().hex())

    def open(self, sealed: bytes, info: bytes) -> bytes | None:
        """Decrypt a seed; return None if it was sealed to another key or binding, or was changed."""
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
    """Encrypt a seed so that only the helper can read it, and only with the same binding."""
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
    """The message of a client to the server: the row minus its mask, mod 2⁶⁴, and the seed of the mask, sealed for the helper."""

    words: Words
    sealed: bytes


def mask_row(row: Words, round_: RoundBinding, node: int, helper_key: str) -> MaskedRow:
    """Mask a row with a fresh seed that is used once; return the masked row and the sealed seed."""
    require(len(row) == round_.columns, f"the row has {len(row)} words; the round has {round_.columns}.")
    seed = fresh_seed()
    return MaskedRow(hide(row, seed), seal(seed, helper_key, round_.info(node)))


Seeds = list[tuple[int, bytes]]
Asked = tuple[RoundBinding, TwoPartyGaussian]
AdmitAnswer = Callable[..., None]
"""A function of one or several `Asked` that returns after the answer to a round is charged on disk; raises `InputError` if it
exceeds the helper's limits. `Seeds` are nodes and their sealed seeds."""


class BadSeeds(InputError):
    """Some seeds can't be decrypted with this round's binding. Nothing was charged; the server may ask again for the others."""

    def __init__(self, nodes: list[int]) -> None:
        super().__init__(
            f"the seeds of {len(nodes)} clients don't open: they were sealed for another helper, run, round, node, nonce, row "
            "length, clip or mechanism, or were changed on the way."
        )
        self.nodes = nodes


@dataclass(frozen=True)
class HelperAnswer:
    """The sum of the masks and the helper's noise, mod 2⁶⁴, and the hash of its round and set of clients (`set_digest`)."""

    words: Words
    digest: str


@dataclass(frozen=True)
class Helper:
    """The second aggregator of two-party aggregation.

    Args:
        key: its private key; sites pin the public key.
        min_clients: the smallest number of clients whose masks it adds.
        admit: checks the limits and charges an answer.
        noise: returns a fresh source of noise at each call.
    """

    key: PrivateKey
    min_clients: int
    admit: AdmitAnswer
    noise: Callable[[], Noise]

    def answer(self, *groups: tuple[RoundBinding, Seeds]) -> list[HelperAnswer]:
        """Charge and return the answer to a round for disjoint sets of clients, one set for each candidate of a tournament.

        Raises `InputError` with the reason if it is refused.
        """
        asked = [(round_, _mechanism(round_, len(seeds))) for round_, seeds in groups]
        nodes = [node for _, seeds in groups for node, _ in seeds]
        require(len(set(nodes)) == len(nodes), "a client is in the sets twice, so its update would be counted twice.")
        fewest = max(FEWEST, self.min_clients)
        require(
            min(len(seeds) for _, seeds in groups) >= fewest,
            f"the set is too small: this helper adds no fewer than {fewest} clients, because the sum of a few tells about each.",
        )
        opened = {n: self.key.open(sealed, round_.info(n)) for round_, seeds in groups for n, sealed in seeds}
        known = {node: seed for node, seed in opened.items() if seed is not None}
        if len(known) < len(opened):
            raise BadSeeds([node for node in opened if node not in known])
        require(len(set(known.values())) == len(known), "two clients have the same seed, which no honest client has.")
        self.admit(*asked)
        answers = []
        for (round_, mechanism), (_, seeds) in zip(asked, groups, strict=True):
            total = to_words(mechanism.noise_units(round_.columns, "helper", self.noise(), self.noise())).copy()
            for node, _ in seeds:
                total += expand(known[node], round_.columns)
            answers.append(HelperAnswer(total, set_digest(round_, seeds)))
        return answers


def _mechanism(round_: RoundBinding, clients: int) -> TwoPartyGaussian:
    """Decode the mechanism of a round; raise `InputError` unless it is two-party and written exactly as `encode` writes it."""
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
    mechanism.check_headroom(clients)
    return mechanism


def server_release(
    mechanism: TwoPartyGaussian, words: list[Words], answer: Words, denominator: float, noise: Callable[[], Noise]
) -> Release:
    """Compute the release on the server: unmask the sum, and add the server's own noise if both parties add noise."""
    total = unmask_sum(words, answer)
    if "server" in mechanism.sides:
        total += to_words(mechanism.noise_units(len(answer), "server", noise(), noise()))
    return mechanism.decode(from_words(total), len(words), denominator)


def unmask_sum(words: list[Words], answer: Words) -> Words:
    """Return the unmasked sum that the server learns: Σ of the rows plus the helper's noise, mod 2⁶⁴."""
    total = np.array(answer, dtype=np.uint64)
    for row in words:
        total += row
    return total
