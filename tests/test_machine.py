"""Threads treat the smallest numbers alike, and jobs run side by side."""

import pytest
import torch
from torch import nn

from dpfedexp import Federation, Sgd, cdp_fedexp, train
from dpfedexp.core.clipping import BLOCK, row_norms
from dpfedexp.machine import JobProgress, run_jobs, run_on_threads, without_subnormals
from dpfedexp.mechanisms.base import total
from dpfedexp.trainers.execution import Execution


def halves() -> bool:
    """Whether this thread has numbers below the smallest normal one."""
    return float(torch.tensor(2.0**-126) * 0.5) > 0


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_subnormals_vanish_on_this_thread_alone_and_only_meanwhile():
    seen = []
    with without_subnormals():
        assert not halves()
        with without_subnormals():
            assert not halves()
        assert not halves(), "a caller from such a thread finds it as it was"
        run_on_threads(lambda _: seen.append(halves()), range(2), 2)
    assert halves()
    assert seen == [True, True]
    with pytest.raises(KeyError), without_subnormals():
        raise KeyError
    assert halves()


@pytest.mark.parametrize(("trainer", "clients"), [("fast", 6), ("tiled-vectorized", 1), ("tiled-loop", 6)])
def test_clients_train_without_subnormals_and_leave_none_of_it_behind(trainer, clients, two_threads):
    """Targets so small that every gradient is subnormal: even a rate of 1024 makes nothing of it."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    data = Federation.from_clients([(torch.ones(4, 3), torch.full((4, 1), 2.0**-130)) for _ in range(clients)])
    run = train(
        model,
        data,
        cdp_fedexp(clip=1.0, noise_multiplier=1e-45),
        loss="mse",
        local=Sgd(lr=1024.0, steps=1),
        rounds=1,
        execution=Execution(trainer=trainer),
    )
    assert halves()
    assert float(run.model.weight.detach().abs().max()) < 2.0**-126


def test_norms_and_sums_of_long_rows_do_not_depend_on_the_rows_beside_them(two_threads):
    rows = torch.randn(5, 3 * BLOCK + 17)
    norms = row_norms(rows)
    assert torch.equal(norms, torch.cat([row_norms(row[None]) for row in rows]))
    torch.testing.assert_close(norms, rows.double().norm(dim=1), rtol=1e-13, atol=0)
    torch.testing.assert_close(total(rows), rows.double().sum(0), rtol=1e-13, atol=1e-13)


def test_jobs_come_in_their_order_and_a_failure_comes_through():
    assert run_jobs(lambda x: x * x, [3, 1, 2], "squares", workers=1) == [9, 1, 4]
    with pytest.raises(ZeroDivisionError):
        run_jobs(lambda x: 1 / x, [1, 0], "divisions", workers=1)


def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("dpfedexp.machine.time.monotonic", lambda: now[0])
    progress = JobProgress("runs", [1.0] * 4)
    for moment in (5.0, 31.0, 40.0, 70.0):
        now[0] = moment
        progress.advance(1.0)
    assert capsys.readouterr().err.splitlines() == ["runs: 2/4", "runs: 4/4"]
