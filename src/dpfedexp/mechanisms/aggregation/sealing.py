"""A seed under the helper's public key: HPKE (RFC 9180) of the `cryptography` package, and nothing else.

The suite is DHKEM(X25519, HKDF-SHA256), HKDF-SHA256, ChaCha20-Poly1305, in base mode: 32 bytes of encapsulated key and 48 of sealed
seed. Base mode does not say who sealed; a client's identity is the network's to check.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpfedexp.core.noise.masks import SEED_BYTES
from dpfedexp.errors import InputError, require

KEY_BYTES = 32
SEALED_BYTES = 32 + SEED_BYTES + 16


def new_key(path: Path | str) -> str:
    """Write a new private key, for its owner alone, and return the public key that sites pin, as hexadecimal digits."""
    import os

    x25519, _ = _primitives()
    private = x25519.X25519PrivateKey.generate()
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{str(path)!r} exists; a key is never replaced: choose another name.") from None
    with os.fdopen(file, "w", encoding="ascii") as out:
        out.write(private.private_bytes_raw().hex() + "\n")
        out.flush()
        os.fsync(out.fileno())
    public: str = private.public_key().public_bytes_raw().hex()
    return public


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
        text: str = self._key.public_key().public_bytes_raw().hex()
        return text

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
    """The public key, if it is 64 hexadecimal digits."""
    right = isinstance(text, str) and len(text) == 2 * KEY_BYTES and all(c in "0123456789abcdefABCDEF" for c in text)
    require(right, f"{name} is {text!r}; it must be the helper's public key, 64 hexadecimal digits.")
    return str(text).lower()


def seal(seed: bytes, public: str, info: bytes) -> bytes:
    """The seed so that only the helper can read it, and only under the same binding."""
    x25519, suite = _primitives()
    try:
        key = x25519.X25519PublicKey.from_public_bytes(bytes.fromhex(check_public(public)))
        sealed: bytes = suite.encrypt(seed, key, info=info)
    except ValueError:  # such as a point of small order
        raise InputError("helper_key is no usable X25519 public key; ask the helper's operator for it again.") from None
    return sealed


def _primitives() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519
        from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite
    except ModuleNotFoundError:
        raise InputError(
            "sealing seeds needs cryptography 50 or newer, which has HPKE; install it with: pip install 'dpfedexp[flower]'."
        ) from None
    return x25519, Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.CHACHA20_POLY1305)
