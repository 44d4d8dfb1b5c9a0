"""Runs of the suite: recorded as they end, never repeated, stopped cleanly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from reproduction.suite.plan import Size, SuiteRun
from reproduction.suite.problems import PROBLEMS
from reproduction.suite.run import Lines, Place, run_suite

from dpfedexp.errors import InputError
from reproduction.suite import command, made_up, plan, run

TINY = Size(seeds=1, headline_seeds=1, grid_seeds=1, epsilons=(8.0,), headline_epsilons=())


@pytest.fixture
def tiny(monkeypatch):
    """The made-up regression with 30 clients, two rounds and two local steps."""
    problem = replace(
        PROBLEMS["regression-2"],
        make=lambda folders, seed: made_up.regression(2.0, seed, clients=30),
        rounds=2,
        steps=2,
    )
    monkeypatch.setitem(PROBLEMS, "regression-2", problem)
    plan._loaded.cache_clear()
    yield problem
    plan._loaded.cache_clear()


def test_a_finished_suite_is_not_run_again(tiny, tmp_path, monkeypatch):
    lines, outcome = run_suite(["regression-2"], TINY, tmp_path, Place())
    assert not outcome.failed
    assert not outcome.stopped
    # The grid has 9 runs; FedAvg at the best rate and at server rate 1 is one of them.
    assert len(lines.records) >= 9 + 1 + 4 + 5
    assert len({record.key for record in lines.records}) == len(lines.records)
    monkeypatch.setattr(run, "_one", lambda *rest: pytest.fail("a recorded run was made again"))
    again, _ = run_suite(["regression-2"], TINY, tmp_path, Place())
    assert [record.to_line() for record in again.records] == [record.to_line() for record in lines.records]


def test_a_suite_that_was_stopped_goes_on_where_it_was_and_ends_with_the_same_numbers(tiny, tmp_path, monkeypatch):
    whole, _ = run_suite(["regression-2"], TINY, tmp_path / "whole", Place())
    stopped, outcome = run_suite(["regression-2"], TINY, tmp_path / "cut", Place(limit_seconds=0.0))
    assert outcome.stopped
    assert not stopped.records
    path = tmp_path / "cut" / "suite" / "runs.jsonl"
    path.parent.mkdir(parents=True)
    kept = [record.to_line() for record in whole.records[:5]]
    # Killed while it wrote the sixth line.
    path.write_text("\n".join([*kept, whole.records[5].to_line()[:40]]), encoding="utf-8")
    rest, outcome = run_suite(["regression-2"], TINY, tmp_path / "cut", Place())
    assert [record.to_line() for record in rest.records[:5]] == kept
    assert not outcome.stopped
    assert {record.key: record.finals for record in rest.records} == {
        record.key: record.finals for record in whole.records
    }


def test_other_data_make_other_runs(tiny, tmp_path):
    lines = Lines(tmp_path)
    one = SuiteRun("regression-2", "fedavg", 8.0, 0, 0.03)
    lines.data(tiny, "these data")
    lines.add(
        one,
        {"finals": {"test_loss": 1.0}, "curves": {}},
        1.0,
        dict.fromkeys(("commit", "dirty", "versions", "device", "recorded_in")),
    )
    assert lines.result(one) is not None
    lines.data(tiny, "other data")
    assert lines.result(one) is None


def test_a_run_that_fails_is_named_and_the_others_are_made(tiny, tmp_path, monkeypatch):
    whole = SuiteRun.run

    def fails(self, folders, device):
        if self.lr == tiny.rates[-1]:
            raise RuntimeError("no memory")
        return whole(self, folders, device)

    monkeypatch.setattr(SuiteRun, "run", fails)
    lines, outcome = run_suite(["regression-2"], TINY, tmp_path, Place())
    assert len(lines.records) == 8
    assert len(outcome.failed) == 1
    assert "no memory" in outcome.failed[0]


def test_an_unknown_problem_is_one_sentence():
    with pytest.raises(InputError, match=r"regresion-2.*Did you mean 'regression-2'"):
        command.suite(["regresion-2"], TINY, Place(), Path("nowhere"), False, lambda text: None)


def test_a_problem_without_its_data_is_left_out_with_a_sentence(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_SUITE", str(tmp_path / "empty"))
    for name in set(PROBLEMS) - {"chem97", "regression-2"}:
        monkeypatch.delitem(PROBLEMS, name)
    out = tmp_path / "out"
    heard: list[str] = []
    command.suite([], Size(), Place(limit_seconds=0.0), out, False, heard.append)
    assert any(text.startswith("chem97 is left out") and "--prepare" in text for text in heard)
    assert (out / "suite.md").exists()
