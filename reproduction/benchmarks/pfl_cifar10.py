"""pfl's CIFAR-10 benchmark: 1000 clients × 50 images, 50 of them a round, one epoch in batches of 10, ours beside pfl's own code.

    python -m reproduction.benchmarks.pfl_cifar10 [--device cuda] [--precision tf32] [--rounds 1500] [--private]
        [--partition dirichlet] [--sampling poisson] [--pfl FOLDER-WITH-PFL] [--pfl-rounds 100] [--processes 2] [--out FILE]

Without --rounds it is the whole benchmark: 1500 rounds, or 3000 with --private (ε = 2, δ = 1e-6, clip 0.4, noise as for a cohort of
1000 of a million clients). pfl runs where it can be imported, from --pfl or from the environment, on the same arrays and from the
same start; with fewer rounds (--pfl-rounds) only its seconds per round compare. Evaluation is not in the seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpfedexp import (
    Evaluation,
    Execution,
    Federation,
    FixedSize,
    LargerCohort,
    OnAdvice,
    Poisson,
    Sgd,
    dp_fedavg,
    fedavg,
    train,
)
from dpfedexp.data.data_sets import DATA_SETS
from reproduction.benchmarks.networks import build

SYSTEMS = Path(__file__).resolve().parent / "systems"
CLIENTS, COHORT, CLIP, DELTA = 1000, 50, 0.4, 1e-6
NOISE_COHORT, POPULATION = 1000, 10**6


def federation(given: argparse.Namespace) -> tuple[Federation, tuple[torch.Tensor, torch.Tensor]]:
    images = DATA_SETS["cifar10"].load(given.data)
    x, y = images.inputs, images.targets
    if given.partition == "iid":
        return Federation.iid(x, y, clients=CLIENTS, seed=given.seed), images.test
    return Federation.dirichlet(x, y, clients=CLIENTS, alpha=0.1, seed=given.seed), images.test


def noise_multiplier(given: argparse.Namespace) -> float | None:
    """z of the whole benchmark's ε: the accountant of ours, for a cohort of 1000 of a million clients."""
    if not given.private or given.noise_multiplier is not None:
        return given.noise_multiplier
    from dpfedexp.accounting import Sampling, calibrate_noise
    from dpfedexp.accounting.events import central_gaussian

    sampling = Sampling("poisson", NOISE_COHORT / POPULATION)
    return calibrate_noise(
        lambda z: central_gaussian(z, "add-remove", sampling), target_epsilon=2.0, delta=DELTA, rounds=3000
    )


def ours(given: argparse.Namespace, clients: Federation, test: Any, z: float | None) -> dict[str, Any]:
    began = time.perf_counter()
    sampled = Poisson(COHORT / CLIENTS) if given.sampling == "poisson" else FixedSize(COHORT)
    algorithm = dp_fedavg(clip=CLIP, noise_multiplier=z, delta=DELTA, adjacency="add-remove") if z else fedavg()
    run = train(
        build("pfl_cifar_net", given.seed),
        clients,
        algorithm,
        local=Sgd(lr=0.1, epochs=1, batch_size=10),
        rounds=given.rounds,
        execution=Execution(device=given.device, precision=given.precision, trainer=given.trainer, seed=given.seed),
        participation=LargerCohort(sampled, NOISE_COHORT, POPULATION) if given.private else sampled,
        evaluate=Evaluation(test, every=given.evaluate_every),
        on_round=OnAdvice(lambda advice: None),
    )
    seconds = [record["seconds"] for record in run.history]
    measured = [(record["round"], record["test_accuracy"]) for record in run.history if "test_accuracy" in record]
    return {
        "system": "dpfedexp",
        "trainer": run.trainer,
        "rounds": len(seconds),
        "seconds_per_round": statistics.median(seconds[3:] or seconds),
        "seconds": sum(seconds),
        "seconds_with_everything": time.perf_counter() - began,
        "accuracy": measured[-1][1],
        "accuracies": measured,
        "epsilon": run.privacy.epsilon_total if z else None,
    }


def theirs(given: argparse.Namespace, clients: Federation, test: Any, z: float | None) -> dict[str, Any]:
    """pfl's row, or why there is none."""
    surroundings = dict(os.environ)
    if given.pfl is not None:
        surroundings["PYTHONPATH"] = os.pathsep.join([str(given.pfl), surroundings.get("PYTHONPATH", "")])
    rounds = given.pfl_rounds or given.rounds
    settings = {
        "device": given.device,
        "precision": given.precision,
        "seed": given.seed,
        "rounds": rounds,
        "cohort": COHORT,
        "clip": CLIP,
        "noise_multiplier": z,
        "noise_cohort": NOISE_COHORT,
        "evaluate_every": given.evaluate_every,
    }
    everybody = [clients.rows[clients.offsets[i] : clients.offsets[i + 1]] for i in range(len(clients))]
    rows = torch.stack(everybody)
    launch = [sys.executable]
    if given.processes > 1:
        surroundings["OMP_NUM_THREADS"] = "1"
        launch += ["-m", "torch.distributed.run", "--nproc-per-node", str(given.processes), "--master-port", "29531"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arrays.npz"
        arrays = {"x": clients.inputs[rows], "y": clients.targets[rows], "test_x": test[0], "test_y": test[1]}
        np.savez(path, **{name: value.numpy() for name, value in arrays.items()})
        command = [*launch, str(SYSTEMS / "pfl_cifar10.py"), str(path), json.dumps(settings)]
        done = subprocess.run(command, cwd=SYSTEMS, env=surroundings, capture_output=True, text=True)
    printed = [line for line in done.stdout.splitlines() if line.startswith("{")]
    name = "pfl" if given.processes == 1 else f"pfl, {given.processes} processes"
    if not printed:
        return {"system": name, "error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return {"system": name, **json.loads(printed[-1])}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with CIFAR-10; DPFEDEXP_DATA by default")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="fp32", choices=("fp32", "tf32", "bf16"))
    parser.add_argument("--trainer", default="auto")
    parser.add_argument("--rounds", type=int, help="1500, or 3000 with --private")
    parser.add_argument("--private", action="store_true")
    parser.add_argument(
        "--noise-multiplier", type=float, help="with --private; calibrated by default, in half a minute"
    )
    parser.add_argument("--partition", default="iid", choices=("iid", "dirichlet"))
    parser.add_argument("--sampling", default="fixed", choices=("fixed", "poisson"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--evaluate-every", type=int, default=100)
    parser.add_argument("--pfl", type=Path, help="folder that pfl is installed in, if it is not in this environment")
    parser.add_argument("--pfl-rounds", type=int, help="0 leaves pfl out")
    parser.add_argument("--processes", type=int, default=1, help="of pfl")
    parser.add_argument("--verbose", action="store_true", help="show how the trainer was chosen")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.rounds is None:
        given.rounds = 3000 if given.private else 1500
    return given


def main() -> None:
    given = arguments()
    if given.verbose:
        logging.basicConfig(level=logging.INFO, format="%(message)s")
        logging.getLogger("dpfedexp").setLevel(logging.DEBUG)
    clients, test = federation(given)
    z = noise_multiplier(given)
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(given).items()}
    device = torch.cuda.get_device_name() if given.device.startswith("cuda") else f"{os.cpu_count()} cores"
    rows = [ours(given, clients, test, z)]
    if given.pfl_rounds != 0:
        rows.append(theirs(given, clients, test, z))
    found: dict[str, Any] = {
        "asked": asked,
        "on": device,
        "torch": torch.__version__,
        "noise_multiplier": z,
        "runs": rows,
    }
    if len(rows) == 2 and "error" not in rows[1]:
        found["times_faster"] = rows[1]["seconds_per_round"] / rows[0]["seconds_per_round"]
    text = json.dumps(found, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
