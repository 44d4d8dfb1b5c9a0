"""What a round costs beside training: sampling, clipping, noise, ledger, checkpoint, evaluation, on the paper's round and on pfl's.

    python -m reproduction.benchmarks.overhead [--device cuda] [--clients 1000] [--rounds 8] [--out FILE]

A whole run with a folder, a checkpoint and an evaluation after every round, twice: as it is, and with a clock around each part, for
which a GPU must finish it. Prints seconds a round (median after a warm-up) of the first run, of the parts in the second, and what a
round takes beside training, which is the first less the second's training.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dpfedexp import Execution, Federation, OnAdvice, Sgd, cdp_fedexp, train
from dpfedexp.accounting import Ledger
from dpfedexp.engine import runner, simulated
from dpfedexp.engine.open_run import OpenRun
from dpfedexp.engine.train import Evaluator
from dpfedexp.mechanisms.central_gaussian import CentralGaussian
from reproduction.benchmarks.workloads import workload

spent: dict[str, float] = defaultdict(float)


def timed(name: str, call: Callable[..., Any], device: str) -> Callable[..., Any]:
    def measured(*args: Any, **options: Any) -> Any:
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        began = time.perf_counter()
        done = call(*args, **options)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        spent[name] += time.perf_counter() - began
        return done

    return measured


def watch(device: str) -> None:
    """The parts of a round by name; all are functions that a run looks up when it needs them."""
    for name, owner, attribute in (
        ("training", simulated.Simulation, "updates"),
        ("noise and release", CentralGaussian, "release"),
        ("lift", CentralGaussian, "randomize"),
        ("sum", CentralGaussian, "collect"),
        ("clip", simulated, "clip"),
        ("ledger", Ledger, "charge"),
        ("epsilon", runner, "epsilon_so_far"),
        ("evaluation", Evaluator, "__call__"),
        ("checkpoint", OpenRun, "complete"),
    ):
        setattr(owner, attribute, timed(name, getattr(owner, attribute), device))


def whole_run(name: str, clients: int, rounds: int, device: str, precision: str) -> tuple[float, dict[str, float]]:
    """Seconds of a round, and of the parts that are being timed."""
    work = workload(name)
    x, y = work.data(clients)
    federation = Federation.from_clients(zip(x, y, strict=True))
    parts: list[dict[str, float]] = []
    ends = [time.perf_counter()]

    def on_round(record: dict[str, Any]) -> None:
        ends.append(time.perf_counter())
        parts.append(dict(spent))
        spent.clear()

    with tempfile.TemporaryDirectory() as folder:
        train(
            work.build(),
            federation,
            cdp_fedexp(clip=0.3, noise_multiplier=5.0),
            local=Sgd(lr=work.lr, steps=work.steps, batch_size=work.batch),
            rounds=rounds + 3,
            evaluate=(x[:20].flatten(0, 1), y[:20].flatten(0, 1)),
            execution=Execution(device=device, precision=precision),
            out=Path(folder) / "run",
            on_round=[on_round, OnAdvice(lambda advice: None)],
        )
    seconds = statistics.median(b - a for a, b in itertools.pairwise(ends[3:]))
    return seconds, {key: statistics.median(part.get(key, 0.0) for part in parts[3:]) for key in parts[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--workload", nargs="*", default=["cnn"])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()

    def runs() -> list[tuple[float, dict[str, float]]]:
        size = (given.clients, given.rounds, given.device, given.precision)
        return [whole_run(name, *size) for name in given.workload]

    as_it_is = runs()
    watch(given.device)
    rows = [
        {
            "workload": name,
            "clients": given.clients,
            "device": given.device,
            "precision": given.precision,
            "seconds_per_round": whole,
            "parts": parts,
            "beside_training": whole - parts["training"],
            "share": (whole - parts["training"]) / whole,
        }
        for name, (whole, _), (_, parts) in zip(given.workload, as_it_is, runs(), strict=True)
    ]
    text = json.dumps(rows, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
