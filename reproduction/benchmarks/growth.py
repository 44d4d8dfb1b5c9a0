"""Seconds and memory of a round against clients, parameters, examples and rounds, with a figure.

    python -m reproduction.benchmarks.growth [--device cuda] [--quick] [--out reproduction/benchmarks/results/growth-cpu.json]

Each point is a process of its own. Rounds are those of one run of a small problem with a folder: the median of the
10 rounds that end there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dpfedexp import Execution, Federation, OnAdvice, Sgd, cdp_fedexp, train
from reproduction.benchmarks.measure import measure, peak_memory

HERE = Path(__file__).resolve().parent


def points(quick: bool) -> dict[str, list[tuple[int, str, int]]]:
    """By what grows: (its size, the workload, clients)."""
    cohorts, widths, examples = (10, 30, 100, 300, 1000), (8, 64, 512, 4096), (15, 60, 240, 960)
    if quick:
        cohorts, widths, examples = cohorts[:3], widths[:3], examples[:3]
    return {
        "clients": [(n, "cnn", n) for n in cohorts],
        "parameters": [(784 * h + 11 * h + 10, f"mlp-{h}", 20) for h in widths],
        "examples": [(rows, f"mlp-64-{rows}", 50) for rows in examples],
    }


def by_rounds(rounds: int, device: str) -> list[dict[str, Any]]:
    """A long run: whether its rounds become slower, and its memory larger."""
    generator = torch.Generator().manual_seed(0)
    clients = Federation.from_clients(
        [(torch.randn(5, 20, generator=generator), torch.randn(5, generator=generator)) for _ in range(50)]
    )
    model = torch.nn.Sequential(torch.nn.Linear(20, 1), torch.nn.Flatten(0))
    ends, rows = [time.perf_counter()], []

    def on_round(record: dict[str, Any]) -> None:
        ends.append(time.perf_counter())
        at = record["round"]
        if at >= 10 and at in {10, 30, 100, 300, 1000, 3000}:
            seconds = statistics.median(after - before for before, after in itertools.pairwise(ends[-11:]))
            rows.append({"size": at, "seconds_per_round": seconds, "peak_memory_bytes": peak_memory(device)})

    with tempfile.TemporaryDirectory() as folder:
        train(
            model,
            clients,
            cdp_fedexp(clip=0.3, noise_multiplier=5.0),
            local=Sgd(lr=0.1, steps=2),
            rounds=rounds,
            execution=Execution(device=device),
            out=Path(folder) / "run",
            on_round=[on_round, OnAdvice(lambda advice: None)],
        )
    return rows


def plot(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    figure, axes = plt.subplots(2, len(found), figsize=(3 * len(found), 5), layout="constrained")
    for column, (name, rows) in enumerate(found.items()):
        sizes = [row["size"] for row in rows]
        seconds, memory = axes[0][column], axes[1][column]
        seconds.plot(sizes, [row["seconds_per_round"] for row in rows], "o-")
        seconds.set(xscale="log", yscale="log", xlabel=name, ylabel="seconds per round")
        lowest = min(row["seconds_per_round"] for row in rows)
        seconds.set_ylim(lowest / 3, 3 * max(row["seconds_per_round"] for row in rows))
        seconds.yaxis.set_minor_formatter(NullFormatter())
        memory.plot(sizes, [row["peak_memory_bytes"] / 1e6 for row in rows], "o-")
        memory.set(xscale="log", xlabel=name, ylabel="peak memory, MB")
        memory.set_ylim(0, 1.1 * max(row["peak_memory_bytes"] / 1e6 for row in rows))
        for axis in (seconds, memory):
            axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "growth.json")
    given = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for name, asked in points(given.quick).items():
        found[name] = []
        for size, work, clients in asked:
            made = {"size": size, **asdict(measure("dpfedexp", work, clients, rounds=3, device=given.device))}
            found[name].append(made)
            print(f"{name} {size}: {made['seconds_per_round']:.4f} s a round", flush=True)
            # After every point, because some take long: what is known stays if somebody stops it.
            given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    found["rounds"] = by_rounds(100 if given.quick else 1000, given.device)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(found, given.out.with_suffix(".png"))
    print(f"Wrote {given.out} and {given.out.with_suffix('.png')}.")


if __name__ == "__main__":
    main()
