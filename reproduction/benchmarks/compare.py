"""Ours beside the plain loop, pfl and Flower's simulation: same model, data, steps and cohort, in one run on one machine.

    python -m reproduction.benchmarks.compare [--clients 1000] [--workloads cnn mlp lstm resnet] [--scaling] [--out FILE]

Run it with the project's environment. pfl gets one of its own beside this file, with the same torch; Flower is an extra of the
project. Every system warms up for a round and is then measured for `--rounds`; the best counts. Ours is measured first and last,
so that a machine that became busier shows.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import venv
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from reproduction.benchmarks.measure import measure

HERE = Path(__file__).resolve().parent
SYSTEMS = HERE / "systems"
PFL = HERE / ".venv" / "pfl"


def pfl_environment() -> Path:
    """pfl with the torch that we run on."""
    python = PFL / "bin" / "python"
    if not (PFL / "installed").exists():
        venv.create(PFL, with_pip=True, clear=True)
        version = torch.__version__.split("+")[0]
        subprocess.run([python, "-m", "pip", "install", "--quiet", f"torch=={version}", "pfl==0.6.0"], check=True)
        (PFL / "installed").touch()
    return python


def foreign(system: str, command: list[Any], one_thread: bool = False) -> dict[str, Any]:
    """Another system's row, from the last JSON line that it prints."""
    surroundings = os.environ | ({"OMP_NUM_THREADS": "1"} if one_thread else {})
    done = subprocess.run(list(map(str, command)), cwd=SYSTEMS, env=surroundings, capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not rows:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return {"system": system, "error": said}
    return {"system": system, **json.loads(rows[-1])}


def pfl(
    system: str, work: str, clients: int, rounds: int, *, processes: int = 1, onednn: bool = True
) -> dict[str, Any]:
    python = pfl_environment()
    script = ["pfl_round.py", work, clients, rounds, *([] if onednn else ["--no-onednn"])]
    if processes == 1:
        return foreign(system, [python, *script])
    launch = [python, "-m", "torch.distributed.run", "--nproc-per-node", processes, "--master-port", 29517]
    return foreign(system, [*launch, *script], one_thread=True)


def flower(system: str, work: str, clients: int, rounds: int, nodes: int) -> dict[str, Any]:
    return foreign(system, [sys.executable, "flower_round.py", work, clients, rounds, nodes])


def compare(work: str, clients: int, rounds: int, everything: bool) -> list[dict[str, Any]]:
    cores = os.cpu_count() or 1
    rows = [asdict(measure("dpfedexp", work, clients, rounds=rounds))]
    rows.append(pfl("pfl, default", work, clients, rounds))
    rows.append(pfl(f"pfl, {cores} processes", work, clients, rounds, processes=cores))
    if everything:
        rows.append(pfl(f"pfl, {cores} processes, oneDNN off", work, clients, rounds, processes=cores, onednn=False))
        rows.append(flower("Flower, a node per client", work, clients, rounds, clients))
        rows.append(flower("Flower, 10 nodes", work, clients, rounds, 10))
        rows.append(asdict(measure("plain loop", work, clients, rounds=rounds, threads=1)))
    rows.append(asdict(measure("dpfedexp", work, clients, rounds=rounds)) | {"system": "dpfedexp, again"})
    return rows


def scaling(rounds: int) -> list[dict[str, Any]]:
    """Seconds per round against the cohort, and against the number of parameters, beside pfl's default."""
    rows = []
    for work, clients in [
        *(("cnn", clients) for clients in (30, 100, 300, 1000)),
        *((f"mlp-{h}", 50) for h in (8, 64, 512, 4096)),
    ]:
        rows.append(asdict(measure("dpfedexp", work, clients, rounds=rounds)))
        rows.append(pfl("pfl, default", work, clients, rounds))
    return rows


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    drawn = [row for row in rows if "seconds_per_round" in row]
    for system in dict.fromkeys(row["system"] for row in drawn):
        for axes, work, by in ((left, "cnn", "cohort"), (right, "mlp-", "parameters")):
            mine = sorted(
                (r[by], r["seconds_per_round"])
                for r in drawn
                if (r["system"], r["workload"][: len(work)]) == (system, work)
            )
            axes.plot([x for x, _ in mine], [y for _, y in mine], "o-", label=system)
    for axes, name in ((left, "clients in the round (d = 5046)"), (right, "parameters (an MLP, 50 clients)")):
        axes.set(xscale="log", yscale="log", xlabel=name, ylabel="seconds per round")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def show(rows: list[dict[str, Any]]) -> None:
    base = {(row["workload"], row["cohort"]): row["seconds_per_round"] for row in rows if row["system"] == "dpfedexp"}
    print(f"{'workload':10}{'clients':>8}  {'system':40}{'s/round':>10}{'times ours':>12}{'peak MB':>10}")
    for row in rows:
        if "error" in row:
            print(f"{'':20}{row['system']:40} {row['error']}")
            continue
        ratio = row["seconds_per_round"] / base.get((row["workload"], row["cohort"]), row["seconds_per_round"])
        print(
            f"{row['workload']:10}{row['cohort']:8}  {row['system']:40}{row['seconds_per_round']:10.3f}{ratio:12.2f}"
            f"{row['peak_memory_bytes'] / 1e6:10.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--workloads", nargs="*", default=["cnn"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--few", action="store_true", help="pfl only")
    parser.add_argument(
        "--scaling", action="store_true", help="also against cohort and number of parameters, with a plot"
    )
    parser.add_argument(
        "--machine", default=f"{os.cpu_count()} {platform.machine()} cores", help="how to call this machine"
    )
    parser.add_argument("--out", type=Path, default=HERE / "results" / "cpu.json")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for work in given.workloads:
        rows += compare(work, given.clients, given.rounds, not given.few)
    if given.scaling:
        rows += scaling(given.rounds)
    found = {"machine": given.machine, "torch": torch.__version__, "rounds": rows}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if given.scaling:
        plot(rows, given.out.with_suffix(".png"))
    show(rows)


if __name__ == "__main__":
    main()
