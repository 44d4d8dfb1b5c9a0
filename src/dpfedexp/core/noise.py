"""Sources of randomness, and the lattice on which a secure run adds its noise.

A simulation draws from keyed streams: every draw is a function of (seed, purpose, round, client) alone, so a run does not depend on
chunk size, device, number of ranks or interruptions. The generator is the counter-based Philox: the key is (seed, purpose), the
counter starts at (place, client, round, lane), so streams never overlap. Noise is drawn on the CPU and moved to the device, so
that a GPU run has the noise of a CPU run.

A secure run draws from the operating system through ChaCha20, whose output can't be predicted or run backwards. Its sums and
its noise are whole multiples of one step, the lattice, so that no low bit of a release reveals the value to which noise was added.
The step is a power of two, so dividing by it and multiplying with it are exact. Values are truncated toward zero, so a vector in
the ball of radius C stays in it. float64 is exact below 2⁵³, and `check_room` refuses sums that could come near.

In two-party aggregation, a mask m splits a client's row x into x − m mod 2⁶⁴ and the 256-bit seed of m, which ChaCha20's key stream
expands to little-endian words. Each part alone is uniform and independent of x. The sums of both parts add up to the sum of rows.
"""

import math
import os
import secrets
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from threading import Lock
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpfedexp.errors import InputError, require
from dpfedexp.machine import run_on_threads


class Noise(Protocol):
    """Randomness for one purpose of one round. Rows are keyed by client, so a draw does not depend on the rest of the chunk.

    In a simulation the noise comes from the seed; in a deployment from the operating system, and the keys are ignored.
    """

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Independent standard normal rows, [len(clients), width]."""

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        """Independent uniform rows on [0, 1), [len(clients), width], float64 on the CPU."""


_NORMAL, _UNIFORM = 0, 1
_LONG = 512
_ROW_PIECE = 2**20
"""How many draws of a row come from one stream; a longer row uses several streams, so that threads can share it."""


@dataclass(frozen=True)
class KeyedNoise:
    """The draws of one purpose in one round; implements `Noise`."""

    seed: int
    purpose: str
    round: int

    def normal(self, clients: Tensor, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        kind = np.float32 if dtype == torch.float32 else np.float64
        out = np.empty((len(clients), width), dtype=kind)
        numbers = clients.tolist()
        pieces = [(row, first) for row in range(len(numbers)) for first in range(0, width, _ROW_PIECE)]

        def draw(begin: int) -> None:
            of = self.generators()
            for row, first in pieces[begin : begin + size]:
                of(numbers[row], _NORMAL, first).standard_normal(out=out[row, first : first + _ROW_PIECE], dtype=kind)

        # Pieces are independent streams, so threads may draw them in any order; short rows are not worth a thread.
        threads = torch.get_num_threads() if width >= _LONG else 1
        size = max(1, len(pieces) if threads == 1 else -(-len(pieces) // (4 * threads)))
        run_on_threads(draw, range(0, len(pieces), size), threads)
        return torch.from_numpy(out).to(device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        out, of = np.empty((len(clients), width)), self.generators()
        for row, client in zip(out, clients.tolist(), strict=True):
            of(client).random(out=row)
        return torch.from_numpy(out)

    def generator(self, client: int) -> np.random.Generator:
        """A generator for one client, for draws of other shapes such as permutations."""
        return self.generators()(client)

    def generators(self) -> Callable[..., np.random.Generator]:
        """Return a function from a client to its generator.

        It moves one generator to the client's counter, which is far cheaper than a generator per client. So each call ends the
        last client's draws.
        """
        bits = np.random.Philox(key=np.array([self.seed, zlib.crc32(self.purpose.encode())], dtype=np.uint64))
        state, generator = bits.state, np.random.Generator(bits)

        def of(client: int, lane: int = _UNIFORM, first: int = 0) -> np.random.Generator:
            # Each draw of a piece uses far fewer than 2³² counter values.
            state["state"]["counter"][:] = (first << 32, client, self.round, lane)
            state["buffer_pos"] = 4
            state["has_uint32"] = 0
            bits.state = state
            return generator

        return of


@dataclass(frozen=True)
class Streams:
    """The random streams of one simulated run."""

    seed: int

    def __post_init__(self) -> None:
        known = isinstance(self.seed, int) and 0 <= self.seed < 2**63
        require(known, f"seed is {self.seed!r}; it must be a whole number from 0 to 2^63 - 1.")

    def at(self, purpose: str, round: int) -> KeyedNoise:
        return KeyedNoise(self.seed, purpose, round)


_BYTES_PER_KEY = 2**30


def key_stream(key: bytes, nonce: bytes = bytes(12)) -> Any:
    """ChaCha20 (RFC 8439) with a 256-bit key, from block 0; its `update` turns zeros into the key stream."""
    try:
        from cryptography.hazmat.primitives.ciphers import Cipher
        from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20 as Algorithm
    except ModuleNotFoundError:
        raise InputError("secure noise needs cryptography; install it with: pip install 'dpfedexp[secure]'.") from None
    return Cipher(Algorithm(key, bytes(4) + nonce), mode=None).encryptor()


class ChaChaNoise:
    """Randomness of ChaCha20 with keys from the operating system; implements `Noise` without regard to the clients' numbers.

    The key changes after every GiB, and in every forked process, because parent and child would otherwise draw the same words.
    Successive draws are independent, so one object serves every purpose of every round. It has no state that could be saved.
    Normals are pairs by Box-Muller from 128 bits: so fine that rounding to the noise grid misses no grid point; at most 9.5.

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
        # Adding ½ keeps the number above 0, so the logarithm is finite.
        radius = words[:half].add(0.5).mul_(2.0**-64).log_().mul_(-2.0).sqrt_()
        angle = words[half:].mul_(2.0 * math.pi * 2.0**-64)
        drawn = torch.cat([radius * angle.cos(), radius * angle.sin()])
        return drawn[:count].reshape(len(clients), width).to(device, dtype)

    def uniform(self, clients: Tensor, width: int) -> Tensor:
        return torch.from_numpy(self.random(len(clients) * width)).reshape(len(clients), width)

    def generator(self, client: int = 0) -> Self:
        """Return this object, which has the two methods of a NumPy generator that client sampling uses."""
        return self

    def random(self, size: int) -> NDArray[np.float64]:
        return (self.words(size) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def choice(self, population: int, size: int, replace: bool) -> NDArray[np.int64]:
        """Draw `size` different numbers below `population`; every set of them is equally likely."""
        require(not replace, "replace is True; this source chooses without replacement only, so leave it False.")
        return np.argsort(self.words(population), kind="stable")[:size]

    def __reduce__(self) -> tuple[type["ChaChaNoise"], tuple[()]]:
        return ChaChaNoise, ()


@dataclass(frozen=True)
class SystemStreams:
    """The counterpart of `Streams` in secure runs: every purpose and round draws from the same unpredictable source."""

    source: ChaChaNoise = field(default_factory=ChaChaNoise)

    def at(self, purpose: str, round: int) -> ChaChaNoise:
        return self.source


Words = NDArray[np.uint64]

BITS = 20
"""Rounded noise has a standard deviation of 2^20 to 2^21 steps: so fine that rounding costs no accuracy, and so coarse that
sampling in double precision reaches every step, even in the tails."""

STRICT_BITS = 30
"""Discrete noise has a standard deviation of 2^30 to 2^31 steps; the accounting treats it as Gaussian up to `STRICT_EXCESS`."""

STRICT_EXCESS = 2.0**-20
"""The fraction by which the charged μ of strict noise exceeds the Gaussian's; docs/security.md has the proof and its range."""

PIECE = 2**18
"""How many numbers a CPU converts at a time: they fit its cache and are enough for every thread."""

_EXACT = 2.0**52

SEED_BYTES = 32
NONCE = b"dpfedexp-2p1"
"""ChaCha20's 96-bit nonce for masks. A seed is used once, so a constant is safe; it separates masks from other uses of a key."""
MOST_WORDS = 2**32
"""The longest mask of one seed: ChaCha20's 32-bit counter of 64-byte blocks reaches eight times as far."""


def step_for(deviation: float, strict: bool = False) -> float:
    """The lattice's step for noise of this standard deviation, which is then 2^BITS (strict: 2^STRICT_BITS) to twice as many steps.

    >>> step_for(1.5) == 2.0**-20
    True
    """
    require(0 < deviation < math.inf, f"the noise has standard deviation {deviation}; it must be a positive number.")
    return 2.0 ** (math.frexp(deviation)[1] - 1 - (STRICT_BITS if strict else BITS))


def truncate(values: Tensor, step: float) -> Tensor:
    """Convert values to whole numbers of steps, truncated toward zero, int64."""
    return (values.double() / step).to(torch.int64)


def truncated_sum(rows: Tensor, step: float) -> Tensor:
    """Sum the rows after truncating each value to the lattice, [width] float64; the sum is exact if `check_room` passed.

    Works on pieces of the rows that fit the CPU's cache. −0 becomes 0: the sign of a zero would reveal the sign of a truncated
    value.
    """
    made = torch.empty(rows.shape[1], dtype=torch.float64, device=rows.device)
    piece = max(1, PIECE // max(1, len(rows))) if rows.device.type == "cpu" else max(1, rows.shape[1])
    for part, into in zip(rows.split(piece, 1), made.split(piece), strict=True):
        torch.sum((part.double() / step).trunc_(), 0, out=into).mul_(step).add_(0.0)
    return made


def check_room(count: int, bound: float, step: float) -> None:
    """Raise `InputError` unless a sum of `count` contributions of at most `bound` is exact in float64."""
    fits = count * (bound / step) < _EXACT
    require(fits, f"the sum of {count} clients needs more than 52 bits; use more noise or fewer clients.")


def add_noise(
    values: Tensor, step: float, deviation: float, noise: Noise, strict: bool = False, row: int = 0
) -> Tensor:
    """Add noise on the lattice to values on the lattice, [n, width] float64; `row` is the first row of `noise` that is used.

    Formal guarantee: the output is the rounding of (value + N(0, deviation²)), because adding a whole number of steps commutes
    with rounding; so it is post-processing of the ideal release. Strict noise is the discrete Gaussian itself.
    """
    units = values / step
    if not torch.equal(units, units.round()):
        raise InputError("the sums are not on the lattice of secure noise; all must come from a secure mechanism.")
    # The next larger float, so that rounding of the quotient never makes the noise smaller.
    scale = math.nextafter(deviation / step, math.inf)
    if strict:
        drawn = discrete_gaussian(units.shape, scale).to(units.device)
    else:
        rows = torch.arange(row, row + len(units))
        drawn = noise.normal(rows, units.shape[1], units.device, torch.float64).mul(scale).round_()
    return units.add_(drawn).mul_(step)


@lru_cache(maxsize=64)
def _discrete(scale: float) -> Callable[[list[int]], list[int]]:
    try:
        import opendp.prelude as dp
    except ModuleNotFoundError:
        raise InputError("strict noise needs OpenDP; install it with: pip install 'dpfedexp[secure]'.") from None
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T="i64")), dp.l2_distance(T=float)
    return dp.m.make_gaussian(*space, scale)


def discrete_gaussian(shape: Sequence[int], scale: float) -> Tensor:
    """Draw independent whole numbers k with probability proportional to exp(−k²/(2·scale²)), as float64.

    The exact discrete Gaussian (Canonne, Kamath, Steinke 2020), sampled by OpenDP with rational arithmetic and system entropy.
    """
    drawn = _discrete(scale)([0] * math.prod(shape))
    return torch.tensor(drawn, dtype=torch.float64).reshape(tuple(shape))


def fresh_seed() -> bytes:
    """Return 256 bits from the operating system, for one row only: two rows under one seed would reveal their difference."""
    return secrets.token_bytes(SEED_BYTES)


def expand(seed: bytes, width: int) -> Words:
    require(len(seed) == SEED_BYTES, f"a seed has {len(seed)} bytes; it must have {SEED_BYTES}.")
    require(1 <= width <= MOST_WORDS, f"a mask of {width} words is asked for; it must have 1 to {MOST_WORDS}.")
    return np.frombuffer(key_stream(seed, NONCE).update(bytes(8 * width)), dtype="<u8").astype(np.uint64, copy=False)


def hide(row: Words, seed: bytes) -> Words:
    """Return the server's part of a row: the row minus the mask of the seed, mod 2⁶⁴."""
    return row - expand(seed, len(row))


def to_words(units: Tensor) -> Words:
    """View whole numbers (int64) as unsigned 64-bit words, equal mod 2⁶⁴, for masks."""
    return units.detach().cpu().contiguous().numpy().view(np.uint64)


def from_words(words: Words) -> Tensor:
    """Convert words to the whole numbers from −2⁶³ to 2⁶³ − 1 that they represent, int64."""
    return torch.from_numpy(np.ascontiguousarray(words, dtype=np.uint64).view(np.int64).copy())


def masked_sum(units: Tensor) -> Tensor:
    """Sum the rows [n, w] as two aggregators do: each row is split by a mask of its own, and the sums of both parts are added.

    The result equals the plain sum mod 2⁶⁴, for any seeds.
    """
    server, helper = (np.zeros(units.shape[1], dtype=np.uint64) for _ in range(2))
    for row in to_words(units):
        seed = fresh_seed()
        server += hide(row, seed)
        helper += expand(seed, len(row))
    return from_words(server + helper).to(units.device)
