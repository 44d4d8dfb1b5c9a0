"""One measurement in a process of its own, for a peak memory of its own: `python -m reproduction.benchmarks.measure '{…}'`."""

from __future__ import annotations

import itertools
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dpfedexp import OnAdvice
from dpfedexp.errors import InputError
from reproduction.benchmarks import networks
from reproduction.benchmarks.workloads import Workload, workload

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Row:
    """Seconds are the best of the rounds after a warm-up; peak memory is that of the whole process (of the GPU on a GPU)."""

    system: str
    workload: str
    cohort: int
    parameters: int
    device: str
    seconds_per_round: float
    cpu_seconds_per_round: float
    peak_memory_bytes: int
    trainer: str = ""


def measure(system: str, name: str, clients: int, *, rounds: int = 3, device: str = "cpu", **options: Any) -> Row:
    """In a child process; `system` is "plain loop" (takes `threads`) or "dpfedexp" (`trainer`, `precision`, `memory`, `secure`)."""
    given = {"system": system, "name": name, "clients": clients, "rounds": rounds, "device": device, **options}
    command = [sys.executable, "-m", "reproduction.benchmarks.measure", json.dumps(given)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        said = said.removeprefix("dpfedexp.errors.InputError: ")
        raise InputError(f"the measurement of {system} on {name} failed: {said}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


def peak_memory(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _ours(
    work: Workload, clients: int, rounds: int, device: str, *, secure: bool = False, **options: Any
) -> tuple[list[float], list[float], str]:
    """As `train` plays and times its rounds; of a secure run, which records no times, by the clock of this function."""
    from dpfedexp import Execution, Federation, Sgd, Stop, cdp_fedexp, train

    x, y = work.data(clients)
    # A secure run trains many clients at once only if their sizes have a public bound.
    most = work.rows if secure else None
    played = rounds + (3 if device.startswith("cuda") else 1)
    wall, cpu = [time.perf_counter()], [time.process_time()]

    def on_round(record: dict[str, Any]) -> None:
        wall.append(time.perf_counter())
        cpu.append(time.process_time())
        if len(cpu) > played:
            raise Stop

    # Many rounds are announced so that the choice of a trainer is made as in a real run; fewer are played.
    run = train(
        work.build(),
        Federation.from_clients(zip(x, y, strict=True)),
        cdp_fedexp(clip=0.3, noise_multiplier=5.0),
        local=Sgd(lr=work.lr, steps=work.steps, batch_size=work.batch, max_examples=most),
        rounds=50,
        execution=Execution(device=device, **options),
        secure=secure,
        on_round=[on_round, OnAdvice(lambda advice: None)],
    )
    elapsed, used = ([after - before for before, after in itertools.pairwise(clock)] for clock in (wall, cpu))
    seconds = [record.get("seconds", own) for record, own in zip(run.history, elapsed, strict=False)]
    return seconds[-rounds:], used[-rounds:], run.trainer


def _loop(
    work: Workload, clients: int, rounds: int, device: str, threads: int = 0
) -> tuple[list[float], list[float], str]:
    from reproduction.benchmarks.pytorch_loop import plain_round

    if threads:
        torch.set_num_threads(threads)
    model = work.build().to(device)
    x, y = (t.to(device) for t in work.data(clients))

    def once(count: int) -> float:
        done = plain_round(
            model, x[:count], y[:count], lr=work.lr, steps=work.steps, clip=0.3, noise=5.0, batch=work.batch
        )
        return float(done.sum())

    once(2)
    wall, cpu = [], []
    for _ in range(rounds):
        began, used = time.perf_counter(), time.process_time()
        once(clients)
        wall.append(time.perf_counter() - began)
        cpu.append(time.process_time() - used)
    return wall, cpu, "plain loop"


def main() -> None:
    given = json.loads(sys.argv[1])
    system, name, clients, rounds, device = (given.pop(k) for k in ("system", "name", "clients", "rounds", "device"))
    work = workload(name)
    run = _loop if system == "plain loop" else _ours
    wall, cpu, trainer = run(work, clients, rounds, device, **given)
    label = " ".join([system, *(f"{key} {value}" for key, value in given.items())])
    parameters = networks.parameters(work.build())
    row = Row(label, name, clients, parameters, device, min(wall), min(cpu), peak_memory(device), trainer)
    print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
