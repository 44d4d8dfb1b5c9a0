"""A sweep from its grid to its page: resumed, ranked and priced."""

import json
import math
import re

import pytest
from typer.testing import CliRunner

from dpfedexp.accounting import GaussianEvent, Ledger, NonPrivateEvent, compose, gdp, noise
from dpfedexp.accounting.events import central_gaussian
from dpfedexp.cli import app
from dpfedexp.cli.trials import Sweep, Trial, _train, price, trials
from dpfedexp.engine.run import RunFolder
from dpfedexp.errors import InputError

pytestmark = pytest.mark.usefixtures("undrawn")

MU = 2.0 / noise(8.0, rounds=1, delta=1e-5)
"""The μ that costs ε = 8."""


def sweep(*arguments):
    return CliRunner().invoke(app, ["sweep", *map(str, arguments)])


def test_a_sweep_ranks_prices_and_never_runs_twice(file, tmp_path, in_process):
    out = tmp_path / "out"
    arguments = (file, "--grid", "algorithm.clip=0.5,2", "--out", out)
    first = sweep(*arguments)
    assert first.exit_code == 0, first.output
    # Two runs of ε = 8 on the same clients cost √2 times the μ.
    both = gdp.epsilon(MU * math.sqrt(2), 1e-5)
    text = " ".join(json.loads((out / "sweep.json").read_text())["text"])
    assert f"the 2 runs cost ε = {both:.3f} together" in text
    assert "under replace-one adjacency" in text
    rows = json.loads((out / "sweep.json").read_text())["tables"][0]["rows"]
    assert sorted(row[0] for row in rows) == ["clip=0.5", "clip=2"]
    assert float(rows[0][1]) <= float(rows[1][1]), "a distance: the least comes first"
    assert (out / "report.html").is_file()
    dates = {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")}
    assert len(dates) == 2
    assert sweep(*arguments).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in out.glob("*/metrics.jsonl")} == dates
    # With other settings, given on the command line or in the file, the finished runs stand for nothing.
    assert sweep(*arguments, "--set", "run.rounds=1").exit_code == 0
    assert len(list(out.glob("*/metrics.jsonl"))) == 4


def together(out):
    """ε of everything that was tried, as the page says it."""
    text = " ".join(json.loads((out / "sweep.json").read_text())["text"])
    return float(re.search(r"runs cost ε = ([0-9.]+) together", text)[1])


def test_what_a_sweep_costs_holds_runs_that_failed(file, tmp_path, in_process, monkeypatch):
    """12.256 was said of three runs of which one had failed after a round, and 14.113 was spent."""
    record = RunFolder.record

    def fails(self, line):
        record(self, line)
        if "clip=5" in str(self.path):
            raise MemoryError("no space left")

    monkeypatch.setattr(RunFolder, "record", fails)
    out = tmp_path / "out"
    done = sweep(file, "--grid", "algorithm.clip=0.5,2,5", "--out", out)
    assert done.exit_code == 3, done.output
    ledgers = [Ledger.open(path, read_only=True) for path in out.rglob("ledger.jsonl")]
    spent = compose([charge for ledger in ledgers for charge in ledger.charges()], 1e-5)
    assert len(ledgers) == 3
    assert together(out) == pytest.approx(spent.epsilon, abs=5e-4)
    assert together(out) > gdp.epsilon(MU * math.sqrt(2), 1e-5) + 0.5, "the round of the run that has no statement"


def test_what_a_sweep_costs_holds_runs_of_an_earlier_grid_and_is_not_known_without_a_ledger(file, tmp_path, in_process):
    out = tmp_path / "out"
    assert sweep(file, "--grid", "algorithm.clip=0.5,2", "--out", out).exit_code == 0
    assert sweep(file, "--grid", "algorithm.clip=3,4", "--out", out).exit_code == 0
    four = gdp.epsilon(MU * 2.0, 1e-5)
    assert together(out) == pytest.approx(four, abs=5e-4)
    first, *_ = sorted(out.rglob("ledger.jsonl"))
    first.unlink()
    assert sweep(file, "--grid", "algorithm.clip=0.5,2", "--out", out).exit_code == 0
    text = " ".join(json.loads((out / "sweep.json").read_text())["text"])
    assert "What the sweep spent is not known" in text
    assert "together" not in text


LARGER = [word for one in ("kind=fixed", "count=4") for word in ("--set", f"participation.{one}")]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            ["algorithm.adjacency=replace-one,add-remove", "--set", "participation.population=20"],
            "--grid has algorithm.adjacency 'add-remove' and 'replace-one'",
        ),
        (["participation.noise_cohort=20,30", *LARGER], "--grid has participation.noise_cohort 20 and 30"),
        (["algorithm.clip=0.5,-1"], "clip is -1"),
    ],
)
def test_settings_are_checked_before_the_first_run(file, tmp_path, given, sentence):
    done = sweep(file, "--grid", *given, "--out", tmp_path / "out")
    assert sentence in str(done.exception)
    assert not (tmp_path / "out").exists()


def test_a_sweep_names_all_of_its_algorithms_and_says_whose_promise_it_is(file, tmp_path, in_process):
    algorithms = ("--grid", "algorithm.name=dp_fedavg,cdp_fedexp")
    done = sweep(file, *algorithms, *LARGER, "--set", "participation.noise_cohort=20", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    text = json.loads((tmp_path / "sweep.json").read_text())["text"]
    assert [line.split(" on ")[0] for line in text[:2]] == ["dp_fedavg", "cdp_fedexp"]
    assert "The promise is that of a larger deployment with 20 clients in a round" in " ".join(text)


def test_a_sweep_of_which_every_run_fails_says_why(file, tmp_path, monkeypatch):
    monkeypatch.setattr("dpfedexp.cli.trials._train", lambda plan, trial, threads: "it broke")
    done = sweep(file, "--grid", "algorithm.clip=0.5,2", "--out", tmp_path / "out")
    assert "every run of the sweep failed, the first with: it broke" in str(done.exception)


def test_the_price_counts_every_run_and_one_of_each_setting():
    event = central_gaussian(10.0)
    found = price([("a", [(event, 5)]), ("a", [(event, 5)]), ("b", [(event, 5)])], 1e-5)
    assert isinstance(event, GaussianEvent)
    assert found.runs == 3
    assert found.one == compose([(event, 5)], 1e-5).epsilon
    assert found.together == compose([(event, 15)], 1e-5).epsilon
    assert found.settings == compose([(event, 10)], 1e-5).epsilon
    with pytest.raises(InputError, match="promise no privacy"):
        price([("a", [(NonPrivateEvent(), 1)])], 1e-5)


def test_a_grid_is_all_combinations_with_every_seed():
    found = trials(["algorithm.clip=0.1,1", "local.lr=0.3"], 2)
    assert [(trial.label, trial.seed) for trial in found] == [
        ("clip=0.1, lr=0.3", 0),
        ("clip=0.1, lr=0.3", 1),
        ("clip=1, lr=0.3", 0),
        ("clip=1, lr=0.3", 1),
    ]
    assert len({trial.folder("") for trial in found}) == 4
    assert trials([], 1) == [Trial((), 0)]
    assert len(trials(["algorithm.clip=1, 1,2"], 1)) == 2, "a value that is there twice is run once"
    assert trials([], 1)[0].label == "as in the file"


def test_commas_in_brackets_and_quotes_are_part_of_a_value():
    (first, second) = trials(["model.options={ inputs = 2, hidden = 3 },{ inputs = 2, hidden = 4 }"], 1)
    assert first.changes == ("model.options={ inputs = 2, hidden = 3 }",)
    assert second.changes == ("model.options={ inputs = 2, hidden = 4 }",)
    assert [trial.changes[0] for trial in trials(['data.path="a,b",c'], 1)] == ['data.path="a,b"', "data.path=c"]


def test_two_trials_never_share_a_folder():
    """Not where letters of one case are the other's, as on some file systems."""
    values = ("1e3", "1E3", "a/b", "a b", "é", "è", "1_c.d=2", "x" * 400 + "a", "x" * 400 + "b")
    trials = [*(Trial((f"a.b={value}",), 0) for value in values), Trial(("a.b=1", "c.d=2"), 0)]
    folders = {trial.folder("").lower() for trial in trials}
    assert len(folders) == len(trials)
    assert all(len(name) < 200 and not set(name) & set("/ :\\") for name in folders)


@pytest.mark.parametrize(
    ("grid", "sentence"),
    [
        (["run.seed=1,2"], "--seeds says how many"),
        (["a.b=1", "a.b=2"], "--grid has a.b twice"),
    ],
)
def test_a_wrong_grid_is_refused(grid, sentence):
    with pytest.raises(InputError, match=sentence):
        trials(grid, 1)


def test_a_run_of_a_sweep_is_a_process_of_its_own(file, tmp_path):
    plan = Sweep(file, tmp_path / "out")
    assert _train(plan, Trial((), 0), 1) == ""
    assert plan.is_finished(Trial((), 0))
