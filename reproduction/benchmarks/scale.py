"""How memory and time grow with clients and parameters, on a CPU.

    python -m reproduction.benchmarks.scale [--out reproduction/benchmarks/results/scale.json]

memory    peak bytes of a process that runs one round of the synthetic problem (d = 100, data made on the fly) for 10³ to 10⁶
          clients, all with the same budget
million   one round of a million clients (d = 100), seconds
resnet    one round of 100 clients of ResNet-18 with GroupNorm (d = 11 million): peak bytes and seconds
privunit  milliseconds per vector at d = 10⁶ beside its Gaussian alone and beside rejection
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent


class Streamed:
    """The paper's linear regression, made client by client from keyed draws: any number of clients in no memory."""

    def __init__(self, clients: int, dimension: int) -> None:
        self.sizes, self.dimension = torch.ones(1, dtype=torch.int64).expand(clients), dimension
        optimum = np.random.Generator(np.random.Philox(key=[0, 1])).standard_normal(dimension)
        self.optimum = optimum.astype(np.float32)

    def __len__(self) -> int:
        return len(self.sizes)

    def gather(self, clients: Tensor, positions: Tensor, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
        bits = np.random.Philox(key=[0, 2])
        # Rewinding one generator costs a tenth of making a new one; the client's number is a word of the counter.
        rng, state, draws = np.random.Generator(bits), bits.state, np.empty((len(clients), self.dimension + 1))
        for row, client in zip(draws, clients.tolist(), strict=True):
            state["state"]["counter"][:] = (0, client, 0, 0)
            bits.state = state
            rng.standard_normal(out=row)
        # x_i - u_i is the sum of two independent standard normals, so one draw of variance 2 has its distribution.
        inputs = (0.1 * draws[:, :1] + np.sqrt(2.0) * draws[:, 1:]).astype(np.float32)
        targets = np.einsum("nd,d->n", inputs, self.optimum, dtype=np.float64).astype(np.float32)
        # A client has a single row: a batch repeats it.
        x, y = (torch.from_numpy(values)[:, None].to(device) for values in (inputs, targets))
        return x.expand(-1, positions.shape[1], -1), y.expand(-1, positions.shape[1])


def synthetic(clients: int, mechanism: str, memory: str) -> dict[str, Any]:
    from dpfedexp import Execution, Sgd, cdp_fedexp, ldp_fedexp, train
    from dpfedexp.models import linear_regression

    algorithm = {
        "central": cdp_fedexp(clip=0.3, noise_multiplier=5.0),
        "local": ldp_fedexp(clip=0.3, noise_multiplier=0.7),
        "privunit": ldp_fedexp(clip=0.3, mechanism="privunit"),
    }[mechanism]
    local = Sgd(lr=0.003, steps=20)
    given = {"local": local, "rounds": 1, "execution": Execution(device="cpu", memory=memory, progress=False)}
    run = train(linear_regression(100), Streamed(clients, 100), algorithm, **given)
    return {
        "clients": clients,
        "mechanism": mechanism,
        "trainer": run.trainer,
        "round_seconds": run.history[0]["seconds"],
    }


def resnet(clients: int) -> dict[str, Any]:
    from dpfedexp import Federation, Sgd, cdp_fedexp, train
    from reproduction.benchmarks.workloads import workload

    work = workload("resnet")
    x, y = work.data(clients)
    whole = Federation.from_clients(zip(x[:, :2], y[:, :2], strict=True))
    algorithm = cdp_fedexp(clip=0.3, noise_multiplier=5.0)
    run = train(work.build(), whole, algorithm, local=Sgd(lr=0.1, steps=1), rounds=1, execution="cpu")
    return {"clients": clients, "trainer": run.trainer, "round_seconds": run.history[0]["seconds"]}


def apart(kind: str, *given: Any) -> dict[str, Any]:
    """In a process of its own, with its seconds, processor seconds and peak memory."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "reproduction.benchmarks.scale", "--one", json.dumps([kind, *given])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=HERE.parents[1])
    found = json.loads(done.stdout.splitlines()[-1]) | {"seconds": time.perf_counter() - began}
    print(found, flush=True)
    return found


def one(kind: str, *given: Any) -> None:
    found = {"synthetic": synthetic, "resnet": resnet}[kind](*given)
    used = resource.getrusage(resource.RUSAGE_SELF)
    found |= {"cpu_seconds": used.ru_utime + used.ru_stime, "peak_memory_bytes": 1024 * used.ru_maxrss}
    print(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--machine", default=f"{os.cpu_count()} {platform.machine()} cores", help="how to call this machine"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "scale.json")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.one:
        one(*json.loads(asked.one))
        return
    from reproduction.benchmarks.components import accounting, privunit

    found: dict[str, Any] = {"machine": asked.machine}
    found["memory"] = [apart("synthetic", 10**n, "local", "16MB") for n in (3, 4, 5, 6)]
    found["million"] = [apart("synthetic", 10**6, "central", "64MB")]
    found["resnet"] = [apart("resnet", 100)]
    found["privunit"] = privunit(clients=1000)
    found["accounting"] = accounting()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
