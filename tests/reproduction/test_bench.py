import json

import pytest
import torch
from reproduction.__main__ import app
from reproduction.benchmarks import components
from reproduction.benchmarks.pytorch_loop import plain_round
from reproduction.benchmarks.workloads import WORKLOADS, wide, workload
from typer.testing import CliRunner

from dpfedexp import Federation, Sgd, fedavg, train
from tests.sizes import long


@long
def test_the_json_list_has_a_row_per_system_with_its_seconds_and_bytes():
    asked = ["bench", "--json", "--workload", "lstm", "--clients", "3", "--rounds", "1", "--secure"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["system"].split()[0] for row in rows] == ["dpfedexp", "dpfedexp", "plain"]
    for row in rows:
        assert row["cohort"] == 3
        assert row["device"] == "cpu"
        assert row["parameters"] == sum(p.numel() for p in workload("lstm").build().parameters())
        assert row["seconds_per_round"] > 0
        assert row["peak_memory_bytes"] > 10**7


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_gives_every_system_the_same_model_and_data(name):
    work = workload(name)
    first, second = work.build(), work.build()
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    x, y = work.data(2)
    assert x.shape[:2] == y.shape == (2, work.rows)
    assert torch.equal(x, work.data(2)[0])


def test_an_epsilon_that_another_accountant_does_not_confirm_is_not_timed(monkeypatch):
    monkeypatch.setattr(components.PLDAccountant, "get_epsilon", lambda self, delta: 1.0)
    with pytest.raises(RuntimeError, match="and 1 by dp-accounting; they must agree within 1 %"):
        components.accounting(rounds=2)


def test_the_plain_loop_takes_our_round():
    """Without noise and without a clip in effect: the mean of the updates."""
    work = wide(4)
    model = work.build()
    x, y = work.data(3)
    loop = plain_round(model, x, y, lr=0.1, steps=2, clip=1e6, noise=0.0)
    clients = Federation.from_clients(zip(x, y, strict=True))
    ours = train(model, clients, fedavg(), local=Sgd(lr=0.1, steps=2), rounds=1, execution="cpu")
    start, end = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (model, ours.model))
    assert torch.allclose(end - start, loop, atol=1e-6)
