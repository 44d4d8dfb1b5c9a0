"""What each trainer, rule and kernel is worth: one round's local training by every one of them, and by `torch.compile`.

    python -m reproduction.benchmarks.trainers [--device cuda] [--precision tf32] [--workloads cnn resnet] [--out FILE]

All ways to train the same clients take turns in one process, and the best time of each counts, so that ratios mean more than
seconds. `compiled` is `torch.compile(vmap(grad(loss)))` in place of `vmap(grad(loss))`. "fast without X" is the trainer with one
of its parts replaced by the next simpler one. A part stays in the package while it makes a workload at least 1.3 times as fast.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from dpfedexp import Execution, Federation, Sgd, cdp_fedexp
from dpfedexp.engine.prepare import prepare
from dpfedexp.trainers.chunk_size import footprint
from dpfedexp.trainers.select import TILE_BYTES, Programs, TrainerParts, makers, sample
from dpfedexp.trainers.steps import ByVmap, Loop, Parallel, Steps, Vectorized, cuda_graph
from dpfedexp.trainers.task import Task, Trainer
from reproduction.benchmarks.workloads import workload

CLIENTS = {
    "cnn": 1000,
    "pfl-cnn": 200,
    "mlp": 200,
    "mlp-4096": 100,
    "resnet": 20,
    "lstm": 200,
    "characters": 100,
    "transformer": 100,
    "frozen": 100,
    "embedding": 200,
}
FAST = "dpfedexp.trainers.fast"
PARTS: dict[str, tuple[str, tuple[str, ...], str, Any]] = {
    "patch kernels": ("fast", ("pfl-cnn", "resnet"), f"{FAST}.convolution._own_kernels", lambda *given: None),
    "norm kernels": ("fast", ("resnet",), f"{FAST}.ops._has_kernels", lambda x: False),
    "pool in product": ("fast", ("cnn", "pfl-cnn"), f"{FAST}.trace._Translation._pool_behind", lambda *given: None),
    "matrix units": (
        "fused",
        ("cnn",),
        f"{FAST}.pooled_kernels.RoundedConvolveAndPool.is_supported",
        lambda *given: False,
    ),
}
"""Parts of a trainer: whose, the workloads that ask for them, and what stands in their place."""


def task_of(name: str, clients: int, device: str, precision: str) -> tuple[Task, Any, TrainerParts]:
    work = workload(name)
    x, y = work.data(clients)
    simulation, _ = prepare(
        work.build(),
        Federation.from_clients(zip(x, y, strict=True)),
        cdp_fedexp(clip=0.3, noise_multiplier=5.0),
        local=Sgd(lr=work.lr, steps=work.steps, batch_size=work.batch),
        rounds=1,
        execution=Execution(device=device, precision=precision, trainer="vectorized", chunk_size=clients),
    )
    task, streams = simulation.cohort.task, simulation.cohort.streams
    tile = footprint(task).tile(TILE_BYTES)
    return task, streams, TrainerParts(task, streams, Programs(task), tile)


def ways(name: str, task: Task, streams: Any, parts: TrainerParts) -> dict[str, Callable[[], Trainer]]:
    """Every trainer by name, the compiled ones, and each with one part less."""
    on_cpu = task.device.type == "cpu"
    found: dict[str, Callable[[], Trainer]] = dict(makers(parts))

    def compiled(of: Task) -> Any:
        return torch.compile(Vectorized(of).gradients.program, dynamic=False)

    def tile() -> Trainer:
        apart = task.copy_for_thread()
        return Steps(apart, "compiled", ByVmap(compiled(apart)), streams=streams)

    if name != "characters":
        # Forty unrolled steps of an LSTM take minutes to compile.
        found["compiled"] = (
            (lambda: Parallel("compiled", tile, parts.tile))
            if on_cpu
            else (lambda: Steps(task, "compiled", ByVmap(compiled(task)), record=cuda_graph, streams=streams))
        )
    found["loop"] = lambda: Loop(task, streams)
    for part, (of, where, name_of, instead) in PARTS.items():
        if of in found and name in where and not (on_cpu and part.endswith("kernels")):
            found[f"{of} without {part}"] = partial(Without, parts, of, name_of, instead)
    return found


class Without:
    """A trainer with something else in the place of one of its parts."""

    def __init__(self, parts: TrainerParts, of: str, name: str, instead: Any) -> None:
        self.replaced = partial(patch, name, instead)
        with self.replaced():
            self.trainer = makers(replace(parts, programs=Programs(parts.task)))[of]()
        self.name, self.unit = self.trainer.name, self.trainer.unit

    def __call__(self, *given: Any) -> Tensor:
        with self.replaced():
            return self.trainer(*given)


def seconds(task: Task, trainer: Trainer, clients: Tensor, plan: Any, number: int) -> float:
    w = task.layout.read(task.model).float().to(task.device)
    few = 2 if trainer.unit == 1 and task.device.type != "cpu" else len(clients)
    at = slice(0, few)
    if task.device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    trainer(w, clients[at], plan.part(at), number)
    if task.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * len(clients) / len(clients[at])


def measured(name: str, clients: int, device: str, precision: str, turns: int) -> dict[str, Any]:
    task, streams, parts = task_of(name, clients, device, precision)
    chosen, plan = sample(task, clients)
    made: dict[str, Trainer] = {}
    best: dict[str, float] = {}
    memory: dict[str, int] = {}
    why: dict[str, str] = {}
    for way, make in ways(name, task, streams, parts).items():
        began = time.perf_counter()
        try:
            made[way] = make()
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            for number in range(3 if device == "cuda" else 1):
                best[way] = seconds(task, made[way], chosen, plan, number + 1)
            if device == "cuda":
                memory[way] = torch.cuda.max_memory_allocated()
        except Exception as error:
            made.pop(way, None)
            best.pop(way, None)
            why[way] = f"{type(error).__name__}: {error}"[:200]
        if "loop" in way:
            made.pop(way, None)
        print(f"  {way} {best.get(way, why.get(way))} (first calls {time.perf_counter() - began:.1f})", flush=True)
    for number in range(turns):
        for way, trainer in made.items():
            best[way] = min(best[way], seconds(task, trainer, chosen, plan, number + 4))
    return {
        "workload": name,
        "precision": precision,
        "clients": clients,
        "seconds": dict(sorted(best.items(), key=lambda pair: pair[1])),
        "peak_memory_bytes": memory,
        "left_out": why,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", nargs="*", default=["fp32"])
    parser.add_argument("--workloads", nargs="*", default=list(CLIENTS))
    parser.add_argument("--share", type=float, default=1.0, help="of the clients of a workload")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    on = torch.cuda.get_device_name() if given.device == "cuda" else f"{os.cpu_count()} cores"
    rows = []
    for precision in given.precision:
        for name in given.workloads:
            clients = max(2, round(CLIENTS[name] * given.share))
            print(f"{name}, {precision}, {clients} clients", flush=True)
            row = measured(name, clients, given.device, precision, given.turns)
            rows.append(row)
            for way, best in row["seconds"].items():
                print(f"{name:12} {precision} {way:32} {best:10.5f}", flush=True)
            if given.out is not None:
                text = json.dumps({"device": on, "torch": torch.__version__, "rounds": rows}, indent=1)
                given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
