"""A federation's server says what a simulation of it would say, and keeps it beside its results."""

from __future__ import annotations

import json
import logging

import pytest
from flwr.app import ArrayRecord, ConfigRecord

from dpfedexp.algorithms import dp_fedavg
from dpfedexp.core.local import Sgd
from dpfedexp.flower import DpFedExp

from .loopback import LoopbackGrid, plain_app, problem

LOCAL = Sgd(lr=0.05, steps=2)


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


def test_the_server_logs_the_preflight_and_the_verdict_and_writes_both(tmp_path, caplog):
    federation, model = problem(4)
    strategy = DpFedExp(dp_fedavg(clip=0.5, noise_multiplier=200.0), clients=4, rounds=6, folder=tmp_path)
    with caplog.at_level(logging.INFO, logger="flwr"):
        strategy.start(LoopbackGrid(plain_app(federation, model, LOCAL), 4), ArrayRecord(model.state_dict()))
    warned = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert warned[0].startswith("4 clients: client-level privacy can't work here")
    assert all(line["update_norm"] > 0 for line in strategy.history)
    told = [json.loads(line) for line in (tmp_path / "advice.jsonl").read_text().splitlines()]
    assert [one["sentence"] for one in told] == [one.sentence for one in strategy.commentary.advice]
    # Noise alone passes for a signal twice in a hundred runs: the verdict itself is tested on seeded noise.
    assert [one["code"] for one in told] in (["few-clients", "dead"], ["few-clients"])
    assert set(warned) >= {one["sentence"] for one in told}


def test_a_resumed_server_watches_the_rounds_of_before_too(tmp_path):
    federation, model = problem(4)
    algorithm = dp_fedavg(clip=0.5, noise_multiplier=200.0)
    start = ArrayRecord(model.state_dict())
    for number in (3, 6):
        strategy = DpFedExp(algorithm, clients=4, rounds=6, folder=tmp_path, resume=number == 6)
        grid = LoopbackGrid(plain_app(federation, model, LOCAL), 4)
        if number == 3:
            strategy.begin(start)
            for one in (1, 2, 3):
                messages = strategy.configure_train(one, strategy.reported, ConfigRecord(), grid, 10.0)
                replies = list(grid.pull_messages(grid.push_messages(messages)))
                strategy.aggregate_train(one, replies)
            strategy.ledger.close()
        else:
            strategy.start(grid, start)
    assert len(strategy.commentary.watch._records) == 6
