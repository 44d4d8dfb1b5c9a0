"""Randomness from the operating system through ChaCha20, a generator whose output nobody can continue or turn back."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dpfedexp.errors import InputError


def _fresh_generator() -> np.random.Generator:
    try:
        from randomgen import ChaCha
    except ModuleNotFoundError:
        raise InputError("secure noise needs randomgen; install it with: pip install 'dpfedexp[secure]'.") from None
    return np.random.Generator(ChaCha(key=int.from_bytes(os.urandom(32), "little"), rounds=20))


class ChaChaNoise:
    """ChaCha20 keyed with 256 bits from the operating system; implements `mechanisms.Noise`.

    Successive draws are independent, so one object serves every purpose of every round; the clients' keys mean nothing here. There is
    no seed and no way to read or restore the state. A forked process gets a key of its own.
    """

    def __init__(self) -> None:
        self._generator = _fresh_generator()
        self._owner = os.getpid()

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(self.generator().standard_normal((len(clients), width))).to(device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        return torch.from_numpy(self.generator().random((len(clients), width)))

    def generator(self, client: int = 0) -> np.random.Generator:
        """For draws of another shape, such as who takes part."""
        if os.getpid() != self._owner:
            self._generator, self._owner = _fresh_generator(), os.getpid()
        return self._generator

    def __reduce__(self):
        return ChaChaNoise, ()


@dataclass(frozen=True)
class SystemStreams:
    """In place of a simulation's keyed streams: every purpose and round draws from the same unpredictable source."""

    source: ChaChaNoise = field(default_factory=ChaChaNoise)

    def at(self, purpose: str, round: int) -> ChaChaNoise:
        return self.source
