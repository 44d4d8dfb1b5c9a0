"""Randomness from the operating system through ChaCha20, a generator whose output nobody can continue or turn back."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.errors import InputError, require

_BYTES_PER_KEY = 2**30


def key_stream(key: bytes, nonce: bytes = bytes(12)) -> Any:
    """ChaCha20 (RFC 8439) under a key of 256 bits, from block 0; its `update` turns zeros into the key stream."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20 as Algorithm
    except ModuleNotFoundError:
        raise InputError("secure noise needs cryptography; install it with: pip install 'dpfedexp[secure]'.") from None
    return Cipher(Algorithm(key, bytes(4) + nonce), mode=None).encryptor()


class ChaChaNoise:
    """System randomness; implements `mechanisms.Noise`. The clients' keys mean nothing here.

    A new key is taken after every GiB, and by every forked process, whose parent would otherwise give out the same words.
    Successive draws are independent, so one object serves every purpose of every round. There is no state that could be saved.
    Normals are pairs by Box and Muller's method from 128 bits: rounded to a grid they leave no gaps, and the largest is 9.5.

    >>> ChaChaNoise().uniform(torch.arange(2), 3).shape
    torch.Size([2, 3])
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._rekey()

    def _rekey(self) -> None:
        self._stream = key_stream(os.urandom(32))
        self._left, self._owner = _BYTES_PER_KEY, os.getpid()

    def words(self, count: int) -> NDArray[np.uint64]:
        """Random 64-bit words."""
        size = 8 * count
        with self._lock:
            if self._left < size or self._owner != os.getpid():
                self._rekey()
            self._left -= size
            return np.frombuffer(self._stream.update(bytes(size)), dtype=np.uint64)

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        count = len(clients) * width
        half = (count + 1) // 2
        words = torch.from_numpy(self.words(2 * half).astype(np.float64))
        # A half more than a whole number is never 0, so the logarithm is finite.
        radius = words[:half].add(0.5).mul_(2.0**-64).log_().mul_(-2.0).sqrt_()
        angle = words[half:].mul_(2.0 * math.pi * 2.0**-64)
        drawn = torch.cat([radius * angle.cos(), radius * angle.sin()])
        return drawn[:count].reshape(len(clients), width).to(device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        return torch.from_numpy(self.random(len(clients) * width)).reshape(len(clients), width)

    def generator(self, client: int = 0) -> ChaChaNoise:
        """Itself, which has the two methods of a NumPy generator that choosing clients asks for."""
        return self

    def random(self, size: int) -> NDArray[np.float64]:
        return (self.words(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def choice(self, population: int, size: int, replace: bool) -> NDArray[np.int64]:
        """`size` different numbers below `population`, every set of them equally likely."""
        require(not replace, "replace is True; this source chooses without replacement only, so leave it False.")
        return np.argsort(self.words(population), kind="stable")[:size]

    def __reduce__(self) -> tuple[type[ChaChaNoise], tuple[()]]:
        return ChaChaNoise, ()


@dataclass(frozen=True)
class SystemStreams:
    """In place of a simulation's keyed streams: every purpose and round draws from the same unpredictable source."""

    source: ChaChaNoise = field(default_factory=ChaChaNoise)

    def at(self, purpose: str, round: int) -> ChaChaNoise:
        return self.source
