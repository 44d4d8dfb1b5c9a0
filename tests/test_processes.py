"""Jobs side by side, in order, with an estimate of the time left."""

from __future__ import annotations

import pytest

from dpfedexp.processes import JobProgress, run_all


def test_one_after_the_other_in_the_order_of_the_jobs():
    assert run_all(lambda x: x * x, [3, 1, 2], "squares", workers=1) == [9, 1, 4]


def test_a_failure_comes_through():
    with pytest.raises(ZeroDivisionError):
        run_all(lambda x: 1 / x, [1, 0], "divisions", workers=1)


def test_the_time_left_is_weighed_by_cost(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dpfedexp.processes.time.monotonic", lambda: now[0])
    progress = JobProgress("runs", [3.0, 1.0])
    assert progress.text == "0/2 in 0:00:00"
    now[0] = 30.0
    progress.advance(3.0)
    assert progress.text == "1/2 in 0:00:30, about 0:00:10 left"


def test_without_a_terminal_a_line_now_and_then(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr("dpfedexp.processes.time.monotonic", lambda: now[0])
    progress = JobProgress("runs", [1.0] * 4)
    for moment in (5.0, 31.0, 40.0, 70.0):
        now[0] = moment
        progress.advance(1.0)
    assert [line.split(" in ")[0] for line in capsys.readouterr().err.splitlines()] == ["runs: 2/4", "runs: 4/4"]
