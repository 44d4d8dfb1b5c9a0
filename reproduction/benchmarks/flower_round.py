"""What a server of a deployment computes in a round, beside Flower's own FedAvg on the same replies.

    python -m reproduction.benchmarks.flower_round [--dimension 10000000] [--nodes 3] [--rounds 3] [--out FILE]

Replies are made in this process, so that neither training nor the network is counted: only what the server does from the last reply
to its next request. Prints medians over the rounds after a warm-up. Nodes are taken to train for two seconds (`--train`), during
which a server may draw its noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from dpfedexp import cdp_fedexp
from dpfedexp.flower import DpFedExp
from dpfedexp.flower.messages import NodeRequest, report_content
from dpfedexp.mechanisms import Report

TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 1


class Nodes(Grid):
    """Nodes that answer at once; what a server does between their answers and its next request is timed."""

    def __init__(self, count: int, seconds: float, reply: Callable[[Message], RecordDict]) -> None:
        self.count, self.seconds, self.reply = count, seconds, reply
        self.ready: list[Message] = []
        self.answered: tuple[float, float] | None = None
        self.taken: list[tuple[float, float]] = []

    def get_node_ids(self) -> list[int]:
        return list(range(1, self.count + 1))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        if self.answered is not None:
            wall, processor = self.answered
            self.taken.append((time.perf_counter() - wall, time.process_time() - processor))
        messages = list(messages)
        self.ready = [answered(message, self.reply(message)) for message in messages]
        time.sleep(self.seconds)
        self.answered = time.perf_counter(), time.process_time()
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready, self.ready = self.ready, []
        return ready

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return self.pull_messages(self.push_messages(messages))

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *given: Any, **options: Any) -> Message:
        raise NotImplementedError

    def medians(self) -> dict[str, float]:
        """Over the rounds after the first."""
        columns = zip(*self.taken[1:], strict=True)
        names = ("server seconds", "processor seconds")
        return {name: round(statistics.median(column), 3) for name, column in zip(names, columns, strict=True)}


def answered(message: Message, content: RecordDict) -> Message:
    message.metadata.__dict__["_message_id"] = f"to {message.metadata.dst_node_id}"
    reply = Message(content, reply_to=message)
    reply.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
    return reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimension", type=int, default=10_000_000)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--train", type=float, default=2.0)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    update = torch.randn(1, given.dimension + 1) / 1e4
    start = ArrayRecord({"w": Array(np.zeros(given.dimension, dtype=np.float32))})
    rounds = given.rounds + 2
    private = Nodes(given.nodes, given.train, lambda one: report_content(Report(update), NodeRequest.from_message(one)))
    with tempfile.TemporaryDirectory() as folder:
        algorithm, place = cdp_fedexp(clip=0.5, noise_multiplier=1.0), Path(folder) / "run"
        ours = DpFedExp(algorithm, clients=given.nodes, rounds=rounds, folder=place, node_timeout=1)
        ours.start(private, start)
    trained = np.ascontiguousarray(update[0, :-1].numpy())

    def content(message: Message) -> RecordDict:
        return RecordDict(
            {"arrays": ArrayRecord({"w": Array(trained)}), "metrics": MetricRecord({"num-examples": 1.0})}
        )

    plain = Nodes(given.nodes, given.train, content)
    FedAvg(min_train_nodes=given.nodes, min_available_nodes=given.nodes, fraction_evaluate=0.0).start(
        plain, start, num_rounds=rounds
    )
    found = {
        "dimension": given.dimension,
        "nodes": given.nodes,
        "threads": torch.get_num_threads(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "dpfedexp": private.medians(),
        "Flower's FedAvg": plain.medians(),
    }
    print(json.dumps(found, indent=1))
    if given.out:
        given.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
