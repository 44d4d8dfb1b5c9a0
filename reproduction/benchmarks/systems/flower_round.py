"""A round of Flower's simulation with its FedAvg: `python flower_round.py WORKLOAD CLIENTS ROUNDS [NODES]`; prints one JSON line.

By default every client is a node of its own. With fewer NODES each node trains its share of the clients one after the other and
sends the mean, which is as far as Flower can be tuned for many small clients.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import shared
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

NAME, CLIENTS, ROUNDS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
NODES = int(sys.argv[4]) if len(sys.argv) > 4 else CLIENTS
os.environ |= {"BENCH_WORKLOAD": NAME, "BENCH_CLIENTS": str(CLIENTS), "BENCH_NODES": str(NODES)}
os.environ["PYTHONPATH"] = str(Path(__file__).resolve().parent)


class Timed(FedAvg):
    """FedAvg that notes when a round begins and when its replies are added."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.began: list[float] = []
        self.ended: list[float] = []

    def configure_train(self, *given, **options):
        self.began.append(time.perf_counter())
        return super().configure_train(*given, **options)

    def aggregate_train(self, *given, **options):
        done = super().aggregate_train(*given, **options)
        self.ended.append(time.perf_counter())
        return done


server_app = ServerApp()


@server_app.main()
def main(grid: Grid, context: Context) -> None:
    work = shared.load(NAME)
    model = work.build()
    strategy = Timed(
        fraction_train=1.0,
        fraction_evaluate=0.0,
        min_train_nodes=NODES,
        min_available_nodes=NODES,
        min_evaluate_nodes=0,
    )
    strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=ROUNDS + 1)
    seconds = [b - a for a, b in zip(strategy.began, strategy.ended, strict=True)]
    print(
        json.dumps(
            {
                "workload": NAME,
                "cohort": CLIENTS,
                "parameters": sum(p.numel() for p in model.parameters()),
                "device": "cpu",
                "seconds_per_round": min(seconds[1:]),
                "cpu_seconds_per_round": None,
                "peak_memory_bytes": shared.peak_memory(),
            }
        ),
        flush=True,
    )


if __name__ == "__main__":
    from flower_client import client_app

    run_simulation(
        server_app,
        client_app,
        NODES,
        backend_config={"client_resources": {"num_cpus": 1}, "init_args": {"num_cpus": 2}},
    )
