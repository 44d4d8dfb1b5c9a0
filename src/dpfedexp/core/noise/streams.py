"""Keyed random streams: every draw of a simulation is a function of (seed, purpose, round, client) and of nothing else.

So a run does not depend on the chunk size, the device, the number of ranks, or on where it was interrupted. The generator is the
counter-based Philox: the key is (seed, purpose), the counter starts at (place, client, round, lane), so no two streams ever meet.
Noise is drawn on the CPU and moved, because that is what makes a GPU run equal a CPU run.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dpfedexp.errors import require
from dpfedexp.machine import spread

_NORMAL, _UNIFORM = 0, 1
_LONG = 512
_PIECE = 2**20
"""Draws of one row that follow each other; a longer row consists of several, so that threads can share it."""


@dataclass(frozen=True)
class Streams:
    """All the randomness of one simulated run."""

    seed: int

    def __post_init__(self) -> None:
        require(
            isinstance(self.seed, int) and 0 <= self.seed < 2**63,
            f"seed is {self.seed!r}; it must be a whole number from 0 to 2^63 - 1.",
        )

    def at(self, purpose: str, round: int) -> KeyedNoise:
        return KeyedNoise(self.seed, purpose, round)


@dataclass(frozen=True)
class KeyedNoise:
    """The draws of one purpose in one round; implements `mechanisms.Noise`."""

    seed: int
    purpose: str
    round: int

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        kind = np.float32 if dtype == torch.float32 else np.float64
        out = np.empty((len(clients), width), dtype=kind)
        numbers = clients.tolist()
        pieces = [(row, first) for row in range(len(numbers)) for first in range(0, width, _PIECE)]

        def draw(begin: int) -> None:
            reseed, generator = self._generator()
            for row, first in pieces[begin : begin + size]:
                reseed(numbers[row], _NORMAL, first)
                generator.standard_normal(out=out[row, first : first + _PIECE], dtype=kind)

        # Pieces are independent streams, so threads may draw them in any order; short rows are not worth a thread.
        threads = torch.get_num_threads() if width >= _LONG else 1
        size = max(1, len(pieces) if threads == 1 else -(-len(pieces) // (4 * threads)))
        spread(draw, range(0, len(pieces), size), threads)
        return torch.from_numpy(out).to(device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        out = np.empty((len(clients), width))
        reseed, generator = self._generator()
        for row, client in zip(out, clients.tolist(), strict=True):
            reseed(client, _UNIFORM)
            generator.random(out=row)
        return torch.from_numpy(out)

    def generator(self, client: int) -> np.random.Generator:
        """A generator of one client's own, for draws of another shape such as permutations."""
        return self.generators()(client)

    def generators(self) -> Callable[[int], np.random.Generator]:
        """From a client to its generator, for many clients one after the other: asking for one ends what the one before drew."""
        reseed, generator = self._generator()

        def of(client: int) -> np.random.Generator:
            reseed(client, _UNIFORM)
            return generator

        return of

    def _generator(self) -> tuple[Callable[..., None], np.random.Generator]:
        """One generator and a function that jumps to a client's counter: far cheaper than a generator per client."""
        bits = np.random.Philox(key=np.array([self.seed, zlib.crc32(self.purpose.encode())], dtype=np.uint64))
        state = bits.state

        def reseed(client: int, lane: int, first: int = 0) -> None:
            # A piece uses far fewer counter values than 2³² for each of its draws.
            state["state"]["counter"][:] = (first << 32, client, self.round, lane)
            state["buffer_pos"] = 4
            state["has_uint32"] = 0
            bits.state = state

        return reseed, np.random.Generator(bits)
