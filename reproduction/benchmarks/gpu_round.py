"""One round on a GPU: 1000 clients × 60 images × 10 full-batch steps of the paper's network, every way that there is.

    python -m reproduction.benchmarks.gpu_round --data FOLDER-WITH-MNIST [--quick] [--json FILE]

Prints one JSON object: seconds per round (median, after a warm-up) by trainer and precision, which trainer "auto" takes and what it
measured, seconds of the loop, rounds with local privacy, the accuracy after 50 rounds in float32 and bf16 over three seeds, and
where the GPU's time goes in a fused round.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from dpfedexp import Execution, Federation, Sgd, cdp_fedexp, ldp_fedexp, train
from dpfedexp.data import load_mnist
from dpfedexp.models import build

LOCAL = Sgd(lr=0.1, steps=10)
CDP = cdp_fedexp(clip=0.3, noise_multiplier=5.0)
TRAINERS = ("auto", "fused", "fast", "recorded-vectorised", "vectorised")


class Measured(logging.Handler):
    """What the trainers' own comparison found."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def timed(clients: Federation, network: str, algorithm, rounds: int, **options) -> dict[str, object]:
    """Seconds per round of one run, or why there is none."""
    try:
        torch.cuda.reset_peak_memory_stats()
        model = build(network, 0)
        execution = Execution(device="cuda", **options)
        run = train(model, clients, algorithm, local=LOCAL, rounds=rounds, execution=execution, progress=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    seconds = [record["seconds"] for record in run.history]
    return {
        "trainer": run.trainer,
        "seconds_per_round": statistics.median(seconds[3:] or seconds),
        "best": min(seconds),
        "first": seconds[0],
        "peak_memory_bytes": torch.cuda.max_memory_allocated(),
    }


def accuracy(clients: Federation, test, precision: str, seed: int) -> dict[str, float]:
    began = time.perf_counter()
    run = train(
        build("mnist_cdp_net", seed),
        clients,
        CDP,
        local=LOCAL,
        rounds=50,
        seed=seed,
        test=test,
        execution=Execution(device="cuda", precision=precision),
        progress=False,
    )
    last = [record["test_accuracy"] for record in run.history[-5:]]
    return {"accuracy": statistics.mean(last), "seconds_50_rounds_with_evaluation": time.perf_counter() - began}


def where_time_goes(clients: Federation, precision: str) -> list[dict[str, object]]:
    model = build("mnist_cdp_net", 0)
    execution = Execution(device="cuda", trainer="fused", precision=precision)
    run = {"local": LOCAL, "progress": False, "execution": execution}
    try:
        train(model, clients, CDP, rounds=3, **run)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            train(model, clients, CDP, rounds=6, **run)
    except Exception as error:
        return [{"error": f"{type(error).__name__}: {error}"[:500]}]
    rows = sorted(seen.key_averages(), key=lambda row: row.self_device_time_total, reverse=True)[:25]
    return [
        {"name": row.key[:80], "calls": row.count, "gpu_ms": round(row.self_device_time_total / 1000, 3)}
        for row in rows
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with MNIST's four files")
    parser.add_argument("--quick", action="store_true", help="no loop, one seed")
    parser.add_argument("--json", type=Path, help="write the result here too")
    given = parser.parse_args()
    measured = Measured()
    logging.getLogger("dpfedexp").addHandler(measured)
    logging.getLogger("dpfedexp").setLevel(logging.DEBUG)
    images = load_mnist(given.data)
    x, y = images.train_images[:, None], images.train_labels
    clients = Federation.dirichlet(x, y, clients=1000, alpha=0.3, seed=0)
    test = (images.test_images[:, None], images.test_labels)
    result: dict[str, object] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result["rounds"] = {
        f"{precision} {trainer}": timed(clients, "mnist_cdp_net", CDP, 12, trainer=trainer, precision=precision)
        for precision in ("fp32", "tf32", "bf16")
        for trainer in TRAINERS
    }
    if not given.quick:
        result["loop"] = timed(clients, "mnist_cdp_net", CDP, 1, trainer="loop")
    local = {
        "gaussian": ldp_fedexp(clip=0.3, noise_multiplier=0.7),
        "privunit": ldp_fedexp(clip=0.3, mechanism="privunit"),
    }
    result["local privacy"] = {
        f"{name} {network}": timed(clients, network, algorithm, 8)
        for name, algorithm in local.items()
        for network in ("mnist_ldp_net", "mnist_cdp_net")
    }
    result["accuracy"] = {
        f"{precision} seed {seed}": accuracy(clients, test, precision, seed)
        for seed in range(1 if given.quick else 3)
        for precision in ("fp32", "bf16")
    }
    result["gpu time of six fused rounds"] = {name: where_time_goes(clients, name) for name in ("fp32", "bf16")}
    result["compared"] = measured.lines
    text = json.dumps(result, indent=1)
    print(text)
    if given.json:
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
