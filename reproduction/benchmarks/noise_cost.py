"""How much longer a central release takes with secure and with strict noise: `python -m reproduction.benchmarks.noise_cost`."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dpfedexp.core.clipping import clip
from dpfedexp.core.noise import Streams, SystemStreams
from dpfedexp.mechanisms import CentralGaussian, Mechanism

DIMENSIONS = (237, 5046, 100_000)


def noise_cost(dimension: int, *, strict: bool = True, passes: int = 9) -> tuple[float, float, float | None]:
    """Seconds of a plain, a secure and a strict release, the fastest of several passes.

    Plain and secure passes alternate, so that what else the machine does hits both alike.
    """
    mechanism = CentralGaussian(0.3, 5.0, numerator="free")
    plain = _release(mechanism, Streams(0), dimension)
    secure = _release(mechanism.secure(), SystemStreams(), dimension)
    exact = _release(mechanism.secure(strict=True), SystemStreams(), dimension) if strict else None
    times = [(_seconds(plain, 20), _seconds(secure, 20)) for _ in range(passes)]
    slow = None if exact is None else min(_seconds(exact, 1) for _ in range(3))
    return min(t[0] for t in times), min(t[1] for t in times), slow


def _release(mechanism: Mechanism, streams: Streams | SystemStreams, dimension: int) -> Callable[[], object]:
    rows = torch.randn(10, dimension, generator=torch.Generator().manual_seed(0))
    clients = torch.arange(len(rows))
    report = mechanism.randomize(clip(rows, mechanism.clip), clients, streams.at("local noise", 1))
    sums = mechanism.collect(report)
    return lambda: mechanism.release(
        sums, 1000.0, streams.at("central noise", 1), streams.at("central scalar noise", 1)
    )


def _seconds(work: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - began) / repeats


def main() -> None:
    torch.set_num_threads(1)
    print("| d | plain, µs | secure, µs | secure / plain | strict, ms |\n|---|---|---|---|---|")
    for dimension in DIMENSIONS:
        plain, secure, strict = noise_cost(dimension)
        print(
            f"| {dimension} | {1e6 * plain:.0f} | {1e6 * secure:.0f} | {secure / plain:.2f} | {1e3 * (strict or 0):.1f} |"
        )


if __name__ == "__main__":
    main()
