"""A sweep from its command to its page: resumed, ranked, priced, and privately selected."""

import json
import math

import pytest
from typer.testing import CliRunner

from dpfedexp.accounting import GaussianEvent, NonPrivateEvent, compose, gdp
from dpfedexp.accounting.events.charges import central_gaussian, privunit
from dpfedexp.cli import app
from dpfedexp.errors import InputError
from dpfedexp.sweep.price import price

FILE = """
[data]
kind = "synthetic"
clients = 20
dimension = 4
[algorithm]
name = "dp_fedavg"
clip = 1.0
target_epsilon = 8.0
[local]
lr = 0.1
steps = 2
[run]
rounds = 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(FILE)
    return path


def sweep(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def test_a_sweep_ranks_prices_and_never_runs_twice(file, tmp_path):
    out = tmp_path / "out"
    arguments = (file, "--grid", "algorithm.clip=0.5,2", "--out", out)
    first = sweep(*arguments)
    assert first.exit_code == 0, first.output
    # Two runs of ε = 8 on the same clients cost √2 times the μ.
    both = gdp.epsilon(gdp.mu(8.0, 1e-5) * math.sqrt(2), 1e-5)
    text = " ".join(json.loads((out / "sweep.json").read_text())["text"])
    assert f"the 2 runs cost ε = {both:.3f} together" in text
    rows = json.loads((out / "sweep.json").read_text())["tables"][0]["rows"]
    assert sorted(row[0] for row in rows) == ["clip=0.5", "clip=2"]
    assert float(rows[0][1]) <= float(rows[1][1]), "a distance: the least comes first"
    assert (out / "report.html").is_file()
    dates = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    assert len(dates) == 2
    assert sweep(*arguments).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")} == dates


def test_a_private_selection_shows_the_best_run_and_nothing_of_the_others(file, tmp_path, monkeypatch):
    monkeypatch.setattr("dpfedexp.sweep.selection.number_of_runs", lambda runs, uniform: 2)
    out = tmp_path / "out"
    done = sweep(file, "--grid", "algorithm.clip=0.5,2", "--repeats", "3", "--out", out)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == ["best", "selection.txt"]
    assert "3 on average" in (out / "selection.txt").read_text()
    assert "ε = 11.271 at δ = 1e-05" in (out / "selection.txt").read_text()
    again = sweep(file, "--grid", "algorithm.clip=0.5,2", "--repeats", "3", "--out", out)
    assert isinstance(again.exception, InputError)
    assert "holds a selection already" in str(again.exception)


def test_a_selection_costs_what_its_dearest_setting_does_drawn_or_not(file, tmp_path, monkeypatch):
    """Drawn are only the cheap ones; that a dear one might have been is part of what is shown."""
    monkeypatch.setattr("dpfedexp.sweep.selection.number_of_runs", lambda runs, uniform: 1)
    monkeypatch.setattr("secrets.SystemRandom.choice", lambda self, grid: grid[0])
    out = tmp_path / "out"
    done = sweep(file, "--grid", "algorithm.target_epsilon=1,8", "--repeats", "3", "--out", out)
    assert done.exit_code == 0, done.output
    assert "ε = 11.271 at δ = 1e-05" in (out / "selection.txt").read_text()


def test_a_selection_over_settings_of_unknown_cost_is_refused_before_any_run(file, tmp_path):
    arguments = ("--grid", "algorithm.delta=1e-5,1e-6", "--repeats", "3")
    done = sweep(file, *arguments, "--out", tmp_path / "out")
    assert "private selection needs algorithm.target_epsilon" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_run_that_fails_does_not_take_the_others_with_it(file, tmp_path, monkeypatch):
    monkeypatch.setattr("dpfedexp.sweep.run._train", lambda plan, trial, threads: "it broke")
    done = sweep(file, "--grid", "algorithm.clip=0.5,2", "--out", tmp_path / "out")
    assert isinstance(done.exception, InputError)
    assert "every run of the sweep failed, the first with: it broke" in str(done.exception)


def test_settings_are_checked_before_the_first_run(file, tmp_path):
    done = sweep(file, "--grid", "algorithm.clip=0.5,-1", "--out", tmp_path / "out")
    assert "clip is -1" in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_the_price_counts_every_run_and_one_of_each_setting():
    event = central_gaussian(10.0)
    found = price([("a", [(event, 5)]), ("a", [(event, 5)]), ("b", [(event, 5)])], 1e-5)
    assert isinstance(event, GaussianEvent)
    assert found.runs == 3
    assert found.one == compose([(event, 5)], 1e-5).epsilon
    assert found.together == compose([(event, 15)], 1e-5).epsilon
    assert found.settings == compose([(event, 10)], 1e-5).epsilon
    assert found.one < found.selected


def test_a_selection_has_no_figure_where_none_is_proven():
    report = privunit(1.0, 1.0, 1.0)
    assert price([("a", [(report, 1)]), ("b", [(report, 1)])], 1e-5).selected is None
    with pytest.raises(InputError, match="promise no privacy"):
        price([("a", [(NonPrivateEvent(), 1)])], 1e-5)
