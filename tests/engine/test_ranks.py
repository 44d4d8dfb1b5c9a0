import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from dpfedexp import (
    Execution,
    Federation,
    InputError,
    Poisson,
    Sgd,
    cdp_fedexp,
    dp_scaffold,
    fedavg,
    ldp_fedexp,
    train,
)
from dpfedexp.cli.train import execute
from dpfedexp.config import load
from dpfedexp.core.votes import Ask
from dpfedexp.data import synthetic_regression
from dpfedexp.engine import ranks as distributed
from dpfedexp.engine.prepare import prepare
from dpfedexp.engine.run import RunFolder
from dpfedexp.errors import RoundFailed
from dpfedexp.models import linear_regression
from tests.engine.plain import cases

D, M = 12, 30
LOCAL = Sgd(lr=0.02, steps=3)
LOOP = Execution(device="cpu", trainer="loop")


def uneven():
    _, sampler = cases()["mlp"]
    generator = torch.Generator().manual_seed(0)
    return Federation.from_clients([sampler(n, generator) for n in (1, 7, 3, 4, 9, 2, 5)])


def options():
    return {
        "cdp paper, diagnostics": (
            cdp_fedexp(clip=0.3, noise_multiplier=1.0, numerator="paper"),
            {"diagnostics": True},
        ),
        "privunit": (ldp_fedexp(clip=0.3, mechanism="privunit"), {}),
        "scaffold poisson": (
            dp_scaffold(clip=0.3, noise_multiplier=1.0, adjacency="add-remove"),
            {"participation": Poisson(0.4), "population": M - 1, "execution": Execution(chunk_size=3)},
        ),
        "votes": (cdp_fedexp(clip="adaptive", noise_multiplier=1.0), {}),
        "uneven mini-batches": (fedavg(), {"local": Sgd(lr=0.1, epochs=2, batch_size=2)}),
        "budget": (cdp_fedexp(clip=0.3, noise_multiplier=5.0), {"budget": 3.0, "rounds": 20}),
    }


def asking(*given, **options):
    """A simulation that asks every client for the length of its update, too."""
    made, note = prepare(*given, **options)
    mechanism = made.algorithm.bind(D, M, made.sampling, 3, votes=(Ask("length", 0.0, 2.0),))
    return replace(made, mechanism=mechanism, ballots=lambda s, c, updates, n: updates.norm(dim=1, keepdim=True)), note


def run(name):
    algorithm, more = options()[name]
    given = {"local": LOCAL, "rounds": 3, "progress": False, "device": "cpu"} | more
    if "uneven" in name:
        return train(cases()["mlp"][0], uneven(), algorithm, **given)
    if name == "votes":
        with patch("dpfedexp.engine.train.prepare", asking):
            return train(linear_regression(D), synthetic_regression(M, D, seed=1).federation, algorithm, **given)
    return train(linear_regression(D), synthetic_regression(M, D, seed=1).federation, algorithm, **given)


def summary(result):
    weights = torch.cat([p.detach().flatten() for p in result.model.parameters()])
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in result.history]
    return {"weights": weights, "history": history, "stopped": result.stopped, "epsilon": result.privacy.epsilon_total}


def port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(rank, world, at):
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(at)}


class Remembers(nn.Module):
    """Keeps what one client alone has."""

    def __init__(self, value):
        super().__init__()
        self.linear, self.value, self.kept = nn.Linear(3, 1), value, 0.0

    def forward(self, x):
        largest = float(x.abs().amax())
        if abs(largest - self.value) < 10:
            self.kept = largest
        return self.linear(x)


def remembering(client):
    """A run in which one of two clients, and so one of two ranks, is remembered; the larger client is rank 0's."""
    rows = [(torch.full((4 - i, 3), 100.0 * (i + 1)), torch.zeros(4 - i, 1)) for i in range(2)]
    model, clients = Remembers(100.0 * (client + 1)), Federation.from_clients(rows)
    train(model, clients, fedavg(), local=Sgd(lr=1e-6, steps=1), rounds=2, progress=False, execution=LOOP)


class InterruptedHere(nn.Linear):
    """Somebody presses Ctrl-C on rank 0 in the middle of a round."""

    def forward(self, x):
        if distributed.rank() == 0 and len(x) == 3:
            raise KeyboardInterrupt
        return super().forward(x)


def work(rank, world, at, folder):
    os.environ |= environment(rank, world, at)
    torch.set_num_threads(1)
    assert distributed.join()
    found = {name: summary(run(name)) for name in options()}
    try:
        failing = {"local": LOCAL, "rounds": 2, "progress": False, "device": "cpu"}
        problem = synthetic_regression(M, D, seed=1)
        train(linear_regression(D), problem.federation, fedavg(), evaluate=lambda m: {"x": 1 / 0}, **failing)
    except (ZeroDivisionError, RoundFailed) as error:
        found["failure"] = type(error).__name__
    for client in range(2):
        try:
            remembering(client)
        except (InputError, RoundFailed) as error:
            found["remembers", client] = f"{type(error).__name__}: {error}"
    torch.save(found, f"{folder}/{rank}.pt")
    rows = [(torch.full((3, 3), 100.0), torch.zeros(3, 1)) for _ in range(2)]
    how = {"local": Sgd(lr=1e-6, steps=1), "rounds": 2, "progress": False}
    try:
        train(InterruptedHere(3, 1), Federation.from_clients(rows), fedavg(), execution=LOOP, **how)
    except BaseException as error:
        distributed.leave()
        torch.save(found | {"interrupt": type(error).__name__}, f"{folder}/{rank}.pt")


def test_two_ranks_give_the_run_of_one_process_and_end_together(tmp_path):
    # Rank 1 ends with an exit code if a heartbeat tells it of the interrupt before its connection does.
    with suppress(mp.ProcessExitedException):
        mp.spawn(work, (2, port(), str(tmp_path)), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for name in options():
        alone = summary(run(name))
        for found in (found[name] for found in ranks):
            assert torch.allclose(found["weights"], alone["weights"], rtol=1e-4, atol=1e-5), name
            assert (found["stopped"], len(found["history"])) == (alone["stopped"], len(alone["history"])), name
            assert found["epsilon"] == pytest.approx(alone["epsilon"]), name
            for record, expected in zip(found["history"], alone["history"], strict=True):
                assert record == pytest.approx(expected, rel=1e-4), name
    assert all("vote_length" in record for found in ranks for record in found["votes"]["history"])
    assert [found["failure"] for found in ranks] == ["ZeroDivisionError", "RoundFailed"]
    for client in range(2):
        ended = [found["remembers", client] for found in ranks]
        assert "keeps 'kept' from batch to batch" in ended[client]
        assert ended[1 - client].startswith(f"RoundFailed: rank {client} failed in round 1")
    assert [found.get("interrupt", "RoundFailed") for found in ranks] == ["Interrupted", "RoundFailed"]


@pytest.mark.parametrize("world", [1, 3])
def test_shares_are_a_partition_of_even_work(world):
    sizes = torch.randint(0, 50, (100,), generator=torch.Generator().manual_seed(0))
    shares = [distributed.share(sizes, rank, world) for rank in range(world)]
    assert sorted(torch.cat(shares).tolist()) == list(range(100))
    work = [int(sizes[part].sum()) for part in shares]
    assert max(work) - min(work) <= 50


def test_ranks_that_do_not_know_each_other_are_told_what_is_missing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(InputError, match="RANK"):
        distributed.join()
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE is 'two'"):
        distributed.join()


CONFIG = """
[data]
kind = "synthetic"
clients = 80
dimension = 30
[algorithm]
name = "dp_scaffold"
clip = 0.3
noise_multiplier = 1.0
[local]
lr = 0.02
steps = 3
[run]
rounds = 40
device = "cpu"
chunk_size = 4
"""


def started(config, out, rank, world, at):
    command = [sys.executable, "-m", "dpfedexp", "train", str(config), "--out", str(out), "--quiet"]
    surroundings = os.environ | {"OMP_NUM_THREADS": "1"} | environment(rank, world, at)
    return subprocess.Popen(command, env=surroundings, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)


def test_a_killed_rank_is_reported_and_the_run_resumes_on_another_number_of_ranks(tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(CONFIG)
    at = port()
    pair = [started(config, tmp_path / "out", rank, 2, at) for rank in range(2)]
    metrics = tmp_path / "out" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert time.monotonic() < deadline
        assert pair[0].poll() is None, pair[0].stderr.read()
        time.sleep(0.02)
    pair[1].send_signal(signal.SIGKILL)
    _, said = pair[0].communicate(timeout=60)
    pair[1].communicate()
    assert pair[0].returncode == 3
    assert "rank" in said
    assert "--resume" in said.replace("\n", " ")
    assert "Traceback" not in said
    done = len(metrics.read_text().splitlines())
    assert done < 40
    settings = load(config)
    execute(settings, RunFolder(tmp_path / "out", resume=True), resume=True, progress=False)
    execute(settings, RunFolder(tmp_path / "whole"), progress=False)
    ends = [json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("out", "whole")]
    assert ends[0]["round"] == ends[1]["round"] == 40
    assert ends[0]["distance"] == pytest.approx(ends[1]["distance"], rel=1e-4)
    assert ends[0]["epsilon_total"] == ends[1]["epsilon_total"]


def test_a_rank_that_stops_beating_is_given_up(monkeypatch):
    """As when a machine loses its network: no connection is closed."""
    monkeypatch.setattr(distributed, "EVERY", 0.05)
    given_up = threading.Event()
    monkeypatch.setattr(distributed.Heartbeat, "_give_up", lambda self, other: given_up.set())
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    store.set("beat/1", "0")
    watch = distributed.Heartbeat(store, 0, 2, gone_after=0.5)
    threading.Thread(target=watch._run, daemon=True).start()
    for beat in range(20):
        store.set("beat/1", str(beat))
        time.sleep(0.05)
    assert not given_up.is_set()
    assert given_up.wait(10)
    watch.stop()
