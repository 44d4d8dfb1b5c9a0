"""The noise sources as such: seeded streams and the system's ChaCha20.

A guarantee rests on noise that is new for every coordinate, client, purpose, round, run and process, and that has the law it says.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np
import torch
from scipy.special import ndtr, ndtri
from scipy.stats import chi2

from dpfedexp.audit import bounds
from dpfedexp.audit.bounds import Floats, Result
from dpfedexp.core.noise import Noise
from dpfedexp.core.noise.chacha import ChaChaNoise, SystemStreams
from dpfedexp.core.noise.streams import Streams

PURPOSES = ("local noise", "central noise", "central scalar noise")
ROUNDS, CLIENTS, LENGTH = (1, 2, 3), 3, 1024
Source = Callable[[str, int], Noise]


def audit_noise(seed: int, confidence: float, *, instances: int = 4096) -> list[Result]:
    """Law and independence of both sources, no value twice, and no two instances or processes with the same words."""
    fresh = [SystemStreams() for _ in range(len(PURPOSES) * len(ROUNDS))]
    return [
        *_independence("seeded streams", Streams(seed).at, confidence),
        *_independence("system noise", SystemStreams().at, confidence),
        *_independence("system noise, a new source each", lambda *_: fresh.pop().source, confidence),
        _instances("seeds", lambda n: _bits(Streams(seed + n).at("central noise", 1)), instances),
        _instances("keys of system noise", lambda _: int(ChaChaNoise().words(1)[0]), instances),
        _processes(),
    ]


def _independence(name: str, source: Source, confidence: float) -> list[Result]:
    clients, cpu = torch.arange(CLIENTS), torch.device("cpu")
    where = [(purpose, number) for purpose in PURPOSES for number in ROUNDS]
    drawn = [source(*place) for place in where]
    normal = np.concatenate([noise.normal(clients, LENGTH, cpu, torch.float64).numpy() for noise in drawn])
    uniform = np.concatenate([noise.uniform(clients, LENGTH).numpy() for noise in drawn])
    scores = ndtri(np.clip(uniform, 1e-16, 1.0 - 1e-16))
    failure = bounds.rare(confidence)
    limit, far = bounds.correlation_limit(len(normal), LENGTH, failure), bounds.distance_limit(normal.size, failure)
    detail = f"{len(normal)} rows of {LENGTH}: {len(PURPOSES)} purposes, {len(ROUNDS)} rounds, {CLIENTS} clients"

    def result(unit: str, value: float, claim: float, sees: str) -> Result:
        return Result("noise", name, unit, value, claim, 1.0 - failure, detail, sees=sees)

    low, high = chi2.ppf([failure / 2, 1 - failure / 2], normal.size) / normal.size
    spread = float(np.square(normal).mean())
    return [
        result("largest correlation at any shift", bounds.largest_correlation(normal), limit, f"≥ {2 * limit:.2f}"),
        result("largest correlation, uniforms", bounds.largest_correlation(scores), limit, f"≥ {2 * limit:.2f}"),
        result("values that come twice", float(_twice(normal) + _twice(uniform)), 2.0, "≥ 3 of them"),
        result("distance from the normal law", bounds.distance(ndtr(normal.ravel())), far, f"≥ {2 * far:.3f}"),
        result("distance from the uniform law", bounds.distance(uniform.ravel()), far, f"≥ {2 * far:.3f}"),
        result("variance off 1", abs(spread - 1.0), max(1.0 - low, high - 1.0), f"≥ {2 * (high - 1.0):.3f}"),
    ]


def _twice(values: Floats) -> int:
    return values.size - len(np.unique(values))


def _bits(noise: Noise) -> int:
    drawn = noise.normal(torch.zeros(1, dtype=torch.int64), 1, torch.device("cpu"), torch.float64)
    return int(drawn.numpy().view(np.uint64)[0, 0])


def _instances(name: str, first: Callable[[int], int], instances: int) -> Result:
    """The first 64 bits of many instances. Keys of b bits meet once in about 2^(b/2) of them."""
    again = float(instances - len({first(n) for n in range(instances)}))
    sees, unit = f"keys of ≤ {int(np.log2(instances**2 / 2 / 14))} bits", "first words that come twice"
    return Result("noise", name, unit, again, 0.0, 1 - 1e-9, f"{instances} instances", sees=sees)


def _processes() -> Result:
    """Parent and forked child go on from the same memory, and must not go on with the same words."""
    name, unit = "system noise after a fork", "words in common"
    if not hasattr(os, "fork"):
        return bounds.skip("noise", name, "this system has no fork")
    source = ChaChaNoise()
    source.uniform(torch.arange(1), 8)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, source.uniform(torch.arange(1), 64).numpy().tobytes())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    theirs = np.frombuffer(os.read(reading, 64 * 8), dtype=np.float64)
    os.close(reading)
    os.close(writing)
    ours = source.uniform(torch.arange(1), 64).numpy().ravel()
    common = float(np.isin(ours, theirs).sum()) if len(theirs) == 64 else 64.0
    return Result("noise", name, unit, common, 0.0, 1 - 1e-9, "64 words of each", sees="≥ 1 of them")
