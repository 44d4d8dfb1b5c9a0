"""Where a deployment's noise comes from: the operating system, never a seed."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfedexp.mechanisms import Noise


@dataclass(frozen=True)
class SystemNoise:
    """Draws that nobody can repeat; implements `mechanisms.Noise`. The clients' keys mean nothing here."""

    generator: np.random.Generator

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        drawn = self.generator.standard_normal((len(clients), width))
        return torch.from_numpy(drawn).to(device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        return torch.from_numpy(self.generator.random((len(clients), width)))


def deployment_noise() -> Noise:
    """A fresh source for one purpose of one round: every call has entropy of its own, so no two sources are related."""
    return SystemNoise(np.random.Generator(np.random.Philox(secrets.randbits(256))))
