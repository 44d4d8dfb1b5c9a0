"""Flower's client for `flower_round.py`, in a module of its own because Flower's workers import it by name."""

from __future__ import annotations

import copy
import os
from functools import lru_cache

import shared
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch.nn import functional as F


@lru_cache(maxsize=1)
def problem():
    torch.set_num_threads(1)
    work = shared.load(os.environ["BENCH_WORKLOAD"])
    return work, work.build(), *work.data(int(os.environ["BENCH_CLIENTS"]))


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    work, model, x, y = problem()
    start = message.content["arrays"].to_torch_state_dict()
    mine = range(
        int(context.node_config["partition-id"]), int(os.environ["BENCH_CLIENTS"]), int(os.environ["BENCH_NODES"])
    )
    total = {name: torch.zeros_like(value) for name, value in start.items()}
    local = copy.deepcopy(model)
    for client in mine:
        local.load_state_dict(start)
        optimizer = torch.optim.SGD(local.parameters(), lr=work.lr)
        for _ in range(work.steps):
            optimizer.zero_grad()
            F.cross_entropy(local(x[client]), y[client]).backward()
            optimizer.step()
        for name, value in local.state_dict().items():
            total[name] += value / len(mine)
    content = RecordDict({"arrays": ArrayRecord(total), "metrics": MetricRecord({"num-examples": len(mine)})})
    return Message(content=content, reply_to=message)
