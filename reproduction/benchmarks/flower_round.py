"""What a server of a deployment computes in a round, beside Flower's own FedAvg on the same replies.

    python -m reproduction.benchmarks.flower_round [--dimension 10000000] [--nodes 3] [--rounds 3] [--out FILE]

Replies are made in this process, so that neither training nor the network is counted: only what the server does with them. Prints
medians over the rounds after a warm-up: how long nodes wait for the server (asking; adding up, step and ledger), and
the processor seconds of all of it. Nodes are taken to train for two seconds (`--train`), during which a server draws
its noise and writes its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from dpfedexp import cdp_fedexp
from dpfedexp.flower import DpFedExp
from dpfedexp.flower.messages import report_content
from dpfedexp.mechanisms import Report

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1


class Nodes:
    """As much of Flower's grid as asking needs."""

    def __init__(self, count: int) -> None:
        self.count = count

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.count + 1))


def answered(message: Message, content: RecordDict) -> Message:
    message.metadata.__dict__["_message_id"] = f"to {message.metadata.dst_node_id}"
    reply = Message(content, reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
    return reply


def measured(
    strategy: Any, reply: Callable[[Message], RecordDict], grid: Nodes, asked: argparse.Namespace
) -> dict[str, float]:
    """Medians over the rounds after the first."""
    taken = []
    for number in range(1, asked.rounds + 2):
        processor, begun = time.process_time(), time.perf_counter()
        messages = list(strategy.configure_train(number, strategy.start_arrays, ConfigRecord(), grid))
        sent = time.perf_counter()
        time.sleep(asked.train)
        used = time.process_time() - processor
        replies = [answered(message, reply(message)) for message in messages]
        processor, back = time.process_time(), time.perf_counter()
        strategy.aggregate_train(number, replies)
        taken.append((sent - begun, time.perf_counter() - back, used + time.process_time() - processor))
    names = ("ask seconds", "add seconds", "processor seconds")
    columns = zip(*taken[1:], strict=True)
    return {name: round(statistics.median(column), 3) for name, column in zip(names, columns, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimension", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    grid, update = Nodes(given.nodes), torch.randn(1, given.dimension + 1) / 1e4
    start = ArrayRecord({"w": Array(np.zeros(given.dimension, dtype=np.float32))})
    with tempfile.TemporaryDirectory() as folder:
        algorithm = cdp_fedexp(clip=0.5, noise_multiplier=1.0)
        ours = DpFedExp(
            algorithm, clients=given.nodes, rounds=given.rounds + 1, folder=Path(folder) / "run", node_timeout=1
        )
        ours.begin(start)
        ours.start_arrays = start  # type: ignore[attr-defined]
        private = measured(
            ours,
            lambda message: report_content(Report(update), ours._sent[message.metadata.dst_node_id]),
            grid,
            given,
        )
        ours.finish()
    plain = FedAvg(min_train_nodes=given.nodes, min_available_nodes=given.nodes)
    plain.start_arrays = start  # type: ignore[attr-defined]
    trained = np.ascontiguousarray(update[0, :-1].numpy())

    def content(message: Message) -> RecordDict:
        return RecordDict(
            {"arrays": ArrayRecord({"w": Array(trained)}), "metrics": MetricRecord({"num-examples": 1.0})}
        )

    found = {
        "dimension": given.dimension,
        "nodes": given.nodes,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "dpfedexp": private,
        "Flower's FedAvg": measured(plain, content, grid, given),
    }
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
