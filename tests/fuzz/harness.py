"""Feeds a parser with mutated input and fails on anything but a sentence.

Guided by coverage where atheris is installed (`pip install atheris`); by mutation of the seeds alone where it is not. Both end with
code 0 after the given time, and otherwise with a traceback and the input that caused it.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

try:
    import atheris
except ModuleNotFoundError:
    atheris = None

LONGEST = 8192
SECONDS_PER_INPUT = 60
MEMORY = 6 * 2**30


def instrumented() -> contextlib.AbstractContextManager:
    """Around the import of what is fuzzed."""
    if atheris is None:
        return contextlib.nullcontext()
    return atheris.instrument_imports(include=["dpfedexp"], enable_loader_override=False)


def fuzz(one: Callable[[bytes], None], seeds: Sequence[bytes]) -> None:
    """Calls one(data) with new data until the time is over. Whatever it raises is a finding."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--input", type=Path, help="one input to try, as written after a finding")
    given = parser.parse_args()
    if given.input is not None:
        one(given.input.read_bytes())
        return
    seconds = given.seconds if given.seconds is not None else 60 * given.minutes
    # An input that asks for more than this has found something.
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY if atheris else MEMORY, resource.RLIM_INFINITY))
    if atheris is None:
        _mutate(one, seeds, seconds, given.seed)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, seed in enumerate(seeds):
            (Path(folder) / f"seed-{number}").write_bytes(seed)
        options = {
            "max_total_time": max(1, int(seconds)),
            "max_len": LONGEST,
            "timeout": SECONDS_PER_INPUT,
            "rss_limit_mb": MEMORY // 2**20,
            "seed": given.seed + 1,
            "verbosity": 1,
            "print_final_stats": 1,
            "artifact_prefix": f"{tempfile.gettempdir()}/",
        }
        atheris.Setup([sys.argv[0], *(f"-{name}={value}" for name, value in options.items()), folder], one)
        atheris.Fuzz()


def _mutate(one: Callable[[bytes], None], seeds: Sequence[bytes], seconds: float, seed: int) -> None:
    chance, began, count = random.Random(seed), time.monotonic(), 0

    def hung(*_: object) -> None:
        raise TimeoutError(f"no answer within {SECONDS_PER_INPUT} seconds")

    signal.signal(signal.SIGALRM, hung)
    while time.monotonic() - began < seconds:
        data = mutation(chance, seeds)
        signal.alarm(SECONDS_PER_INPUT)
        try:
            one(data)
        except BaseException:
            path = Path(tempfile.mkstemp(prefix="finding-")[1])
            path.write_bytes(data)
            print(f"finding: --input {path}", file=sys.stderr)
            raise
        finally:
            signal.alarm(0)
        count += 1
    print(f"{count} inputs in {time.monotonic() - began:.0f} s without a finding")


def mutation(chance: random.Random, seeds: Sequence[bytes]) -> bytes:
    data = bytearray(chance.choice(seeds))
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        at = chance.randrange(len(data) + 1)
        match chance.randrange(6):
            case 0 if data:
                data[at % len(data)] = chance.randrange(256)
            case 1:
                data[at:at] = bytes(chance.choice((0, 255, 127, 48, 123)) for _ in range(chance.randrange(9)))
            case 2:
                del data[at : at + chance.randrange(1, 64)]
            case 3:
                other = chance.choice(seeds)
                start = chance.randrange(len(other) + 1)
                data[at:at] = other[start : start + chance.randrange(256)]
            case 4:
                data[at:at] = data[at : at + 32] * chance.randrange(1, 8)
            case 5:
                data[at:at] = chance.choice(
                    (b"1e400", b"-1", b"nan", b"null", b"[[[[", b"{}", b"99999999999999999999", b"\xff\xfe")
                )
    return bytes(data[:LONGEST])
