"""A round of a real deployment beside one of Flower's own FedAvg: the same model, data, SuperLink and SuperNodes.

    python -m reproduction.benchmarks.deployed_round [--dimension 10000000] [--nodes 3] [--rounds 6] [--out FILE]

A SuperLink and SuperNodes on loopback run two apps in turn, twice each: the template's, and one with Flower's FedAvg, torch's own
step and nothing of this library. Seconds are those between two rounds' evaluations on the server, the first round left out. A node
trains for a few milliseconds only, so what is compared is everything else. Nodes ask for work every three seconds, as Flower's do:
single rounds move in such steps, and the mean over rounds is what is shown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import tomli_w

from dpfedexp.flower.app import new_app, run_app
from dpfedexp.flower.local_deployment import Deployment

CLOCK = """
    def evaluate(server_round: int, arrays: ArrayRecord) -> None:
        import time
        with open({times!r}, "a") as file:
            file.write(f"{{server_round}} {{time.monotonic()}}\\n")
"""
OURS = """
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from dpfedexp.flower import strategy_from
from dpfedexp.flower.app_settings import read_settings
from federation import task

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = strategy_from(context.run_config)
{clock}
    start = ArrayRecord(task.build_model().state_dict())
    strategy.start(grid, start, timeout=read_settings(context.run_config)[0].round_timeout, evaluate_fn=evaluate)
"""
PLAIN = """
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from federation import task

app = ServerApp()

@app.main()
def main(grid: Grid, context: Context) -> None:
    nodes, rounds = (context.run_config["federation." + name] for name in ("clients", "rounds"))
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
{clock}
    strategy.start(grid, ArrayRecord(task.build_model().state_dict()), num_rounds=rounds, evaluate_fn=evaluate)
"""
PLAIN_CLIENT = """
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from federation import task

app = ClientApp()

@app.train()
def train(message: Message, context: Context) -> Message:
    model = task.build_model()
    model.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
    inputs, targets = task.data_of(context.node_config)
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    with torch.no_grad():
        model.weight -= 0.02 * model.weight.grad  # torch.optim takes a second or two to import
    metrics = MetricRecord({"num-examples": len(inputs)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics}), reply_to=message)
"""
PLAIN_TASK = """
import torch
from torch import nn

def build_model():
    torch.manual_seed(0)
    return nn.Linear({dimension}, 1, bias=False)

def data_of(node):
{rows}"""


def make_app(folder: Path, times: Path, asked: argparse.Namespace, plain: bool) -> Path:
    """The template's app for a linear model of so many parameters, or Flower's counterpart of it."""
    new_app(folder)
    path = folder / "pyproject.toml"
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    config = content["tool"]["flwr"]["app"]["config"]
    config["federation"] |= {"clients": asked.nodes, "rounds": asked.rounds + 1, "min_reply_fraction": 1.0}
    config["local"] = {"steps": 1}
    path.write_text(tomli_w.dumps(content), encoding="utf-8")
    package = folder / "federation"
    clock = CLOCK.format(times=str(times))
    (package / "server_app.py").write_text((PLAIN if plain else OURS).format(clock=clock), encoding="utf-8")
    # Each node has data of its own, or Flower would carry and keep one reply for all of them.
    rows = f"    return torch.full((1, {asked.dimension}), (1 + node['partition-id']) / {asked.dimension}), torch.ones(1, 1)\n"
    if plain:
        (package / "client_app.py").write_text(PLAIN_CLIENT, encoding="utf-8")
        (package / "task.py").write_text(PLAIN_TASK.format(dimension=asked.dimension, rows=rows), encoding="utf-8")
        return folder
    client = (package / "client_app.py").read_text(encoding="utf-8")
    client = client.replace("task.load_data(data_path(context))", "task.data_of(context.node_config)")
    (package / "client_app.py").write_text(client, encoding="utf-8")
    # Parameters that all differ, as those of real models do: Flower carries equal pieces of an array once.
    text = PLAIN_TASK.format(dimension=asked.dimension, rows=rows)
    (package / "task.py").write_text(f"{text}\nLOSS = None\n", encoding="utf-8")
    return folder


def seconds_of(times: Path) -> list[float]:
    """Between the evaluations of one round and the next; those of the start and of the first round are left out."""
    lines = [line.split() for line in times.read_text(encoding="utf-8").splitlines()]
    clock = {int(number): float(second) for number, second in lines}
    return [clock[number] - clock[number - 1] for number in sorted(clock) if number > 1]


def measure(place: Path, asked: argparse.Namespace) -> dict[str, Any]:
    environment = {"DPFEDEXP_DATA": "", "DPFEDEXP_PRIVATE": str(place / "private")}
    os.environ.update(environment)
    found: dict[str, list[float]] = {"dpfedexp": [], "Flower's FedAvg": []}
    with Deployment(place / "up", asked.nodes, environment=environment) as deployment:
        os.environ.update(deployment.environment)
        for turn in range(2):
            for plain, (name, seconds) in enumerate(found.items()):
                times = place / f"times-{plain}-{turn}"
                app = make_app(place / f"app-{plain}-{turn}", times, asked, bool(plain))
                folder = f'federation.folder="{place}/out-{turn}"'
                code = run_app(app, "up", [folder])
                taken = seconds_of(times) if times.exists() else []
                if code or len(taken) != asked.rounds:
                    raise SystemExit(f"{name} ended with {code} after {len(taken)} rounds.")
                seconds += taken
                shutil.rmtree(place / f"out-{turn}", ignore_errors=True)
    means = {name: statistics.mean(taken) for name, taken in found.items()}
    return {
        "dimension": asked.dimension,
        "nodes": asked.nodes,
        "rounds": 2 * asked.rounds,
        "seconds a round": {name: round(mean, 2) for name, mean in means.items()},
        "single rounds": {name: [round(second, 1) for second in taken] for name, taken in found.items()},
        "dpfedexp / FedAvg": round(means["dpfedexp"] / means["Flower's FedAvg"], 3),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimension", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    place = Path(tempfile.mkdtemp(prefix="dpfedexp-deployed-"))
    try:
        found = measure(place, asked)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
