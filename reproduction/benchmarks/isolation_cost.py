"""What the isolation of a secure run costs in a round: recorded programs and the comparison of the model's bits.

    python -m reproduction.benchmarks.isolation_cost [--device cuda] [--rounds 15]

For each workload the same secure round is timed with isolation and without it (the caller's code then runs on the clients'
rows), in turn in one process. The median of the ratios counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

import torch

from dpfedexp import Execution, Federation, InputError, Sgd, cdp_fedexp
from dpfedexp.accounting import Ledger
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers.select import Programs, TrainerParts, makers
from dpfedexp.trainers.steps import Loop
from reproduction.benchmarks.workloads import workload

CASES = [
    ("cnn", "auto", 100),
    ("mlp", "auto", 40),
    ("lstm", "auto", 100),
    ("transformer", "auto", 20),
    ("cnn", "vectorized", 100),
    ("lstm", "vectorized", 50),
    ("cnn", "loop", 20),
    ("lstm", "loop", 10),
]
"""Workload, trainer and clients. The first is the paper's network."""


def without(simulation: Engine) -> Engine:
    """The same run, in which the caller's code runs on the clients' rows and nothing is compared."""
    task = replace(simulation.cohort.task, synthetic=None)
    name, tile = simulation.cohort.trainer.name, simulation.cohort.trainer.unit or 1
    parts = TrainerParts(task, simulation.cohort.streams, Programs(task), tile, True)
    trainer = Loop(task, simulation.cohort.streams) if name == "loop" else makers(parts)[name]()
    return replace(simulation, cohort=replace(simulation.cohort, task=task, trainer=trainer))


def seconds(simulation: Engine) -> float:
    began = time.perf_counter()
    simulation.step(simulation.begin(), Ledger.in_memory())
    if simulation.cohort.task.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    print(f"{'workload':12} {'trainer':20} {'clients':>7} {'with':>10} {'without':>10} {'ratio':>7}")
    for name, trainer, clients in CASES:
        work = workload(name)
        x, y = work.data(clients)
        local = Sgd(lr=work.lr, steps=work.steps, batch_size=work.batch, max_examples=work.rows)
        try:
            simulation, _ = prepare(
                work.build(),
                Federation.from_clients(zip(x, y, strict=True)),
                cdp_fedexp(clip=0.3, noise_multiplier=5.0),
                local=local,
                rounds=50,
                secure=True,
                execution=Execution(device=given.device, trainer=trainer),
            )
        except InputError as reason:
            print(f"{name:12} {trainer:20} {clients:7} refused: {reason}", flush=True)
            continue
        both = simulation, without(simulation)
        for one in both * 3:
            seconds(one)
        pairs = [tuple(map(seconds, both)) for _ in range(given.rounds)]
        apart, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(a / b for a, b in pairs)
        used = simulation.cohort.trainer.name
        print(f"{name:12} {used:20} {clients:7} {apart:10.4f} {plain:10.4f} {ratio:7.3f}", flush=True)


if __name__ == "__main__":
    main()
