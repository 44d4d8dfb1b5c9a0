"""A private selection shows the best run with what the selection costs; how many runs there were, and the others, stay private."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dpfedexp import Run
from dpfedexp.accounting import Ledger, compose
from dpfedexp.accounting.pld import selection_epsilon
from dpfedexp.cli import app, trials
from dpfedexp.engine.verify import outcome, read_claim, recompute, verify_run
from tests.cli.test_sweep import sweep
from tests.sizes import long

COST = 11.271
"""ε of the best of 3 runs on average, each of ε = 8 at δ = 1e-5."""
pytestmark = pytest.mark.usefixtures("in_process")
GRID = ("--grid", "algorithm.clip=0.5,2", "--repeats", "3")


@pytest.fixture(autouse=True)
def private(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("private")
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(folder))
    return folder


@pytest.fixture
def drawn(monkeypatch):
    def number(count):
        monkeypatch.setattr("dpfedexp.cli.selection.number_of_runs", lambda runs, uniform: count)

    return number


def everything(folder):
    """All names and contents below a folder, as text."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return " ".join(str(path) + path.read_bytes().decode("latin-1") for path in files)


def test_a_selection_shows_the_best_run_with_its_own_cost_and_nothing_of_the_others(file, tmp_path, private, drawn):
    """best/ said 8.000, and so did verify."""
    drawn(2)
    out = tmp_path / "out"
    done = sweep(file, *GRID, "--out", out)
    assert done.exit_code == 0, done.output
    assert sorted(path.name for path in out.iterdir()) == ["best", "selection.json", "selection.txt"]
    assert "3 on average" in (out / "selection.txt").read_text()
    assert f"ε = {COST} at δ = 1e-05 under replace-one adjacency" in (out / "selection.txt").read_text()
    assert len(list(out.rglob("ledger.jsonl"))) == 1
    assert list(private.rglob("*ledger*")) == []
    assert str(private) not in everything(out), "the path of a run among the others"
    assert "holds a selection already" in str(sweep(file, *GRID, "--out", out).exception)
    assert "holds a private selection" in str(sweep(file, *GRID[:2], "--out", out).exception)
    best = out / "best"
    claim = read_claim(best)
    assert claim.epsilon_total == pytest.approx(COST, abs=5e-4)
    assert claim.selection_runs == 3
    assert "the best of a secret number of runs, 3 on average" in (best / "privacy.txt").read_text()
    assert "the epsilon of the whole selection" in repr(claim)
    said = CliRunner().invoke(app, ["privacy", "verify", str(best), "--json"])
    assert said.exit_code == 0, said.output
    assert json.loads(said.output)["epsilon_total"] == pytest.approx(COST, abs=5e-4)
    # Without its statement the ledger alone says the same.
    assert recompute(best).epsilon_total == claim.epsilon_total
    assert [record["epsilon_total"] for record in Run.load(best).history] == [claim.epsilon_total] * 2
    explained = CliRunner().invoke(app, ["privacy", "explain", str(best)]).output
    assert "epsilon = 11.27" in explained
    assert "8.0" not in explained
    assert CliRunner().invoke(app, ["report", str(best)]).exit_code == 0
    assert "of the whole selection" in (best / "report.html").read_text()
    content = json.loads((best / "privacy.json").read_text())
    for lower in ({"epsilon_total": 8.0}, {"selection_runs": None, "selection_mu": None}):
        (best / "privacy.json").write_text(json.dumps(content | lower))
        assert outcome(verify_run(best)) == "false"


def test_nothing_that_is_shown_tells_how_many_runs_there_were(file, tmp_path, drawn, monkeypatch, capfd):
    """Two selections that show the same run differ in nothing but the draw: not on the terminal, not on disk."""
    monkeypatch.setattr("secrets.SystemRandom.choice", lambda self, grid: grid[0])
    monkeypatch.setattr("secrets.SystemRandom.randrange", lambda self, *given: 7)
    monkeypatch.setattr("dpfedexp.machine.JobProgress.EVERY", 0.0)
    shown = []
    for count in (1, 3):
        drawn(count)
        (tmp_path / str(count)).mkdir()
        monkeypatch.chdir(tmp_path / str(count))
        done = sweep(file, *GRID, "--jobs", "1", "--out", "out")
        assert done.exit_code == 0, done.exception
        out = Path("out")
        names = sorted(str(path.relative_to(out)) for path in out.rglob("*"))
        dates = {path.stat().st_mtime for path in out.rglob("*") if path.is_file()}
        said = (done.stdout, done.stderr, *capfd.readouterr())
        shown.append((said, names, len(dates), (out / "best" / "privacy.txt").read_bytes()))
    assert shown[0] == shown[1]
    assert shown[0][2] == 1, "the time between two files tells how long the runs took"


@long
def test_a_selection_that_was_killed_shows_nothing_and_goes_on_with_the_same_draw(file, tmp_path, private):
    out = tmp_path / "out"
    script = (
        "import dpfedexp.cli.selection as selection, os\n"
        "selection.number_of_runs = lambda runs, uniform: 3\n"
        "selection._publish = lambda *given: os._exit(9)\n"
        "from dpfedexp.cli import app\n"
        f"app(['sweep', {str(file)!r}, *{list(GRID)!r}, '--out', {str(out)!r}])\n"
    )
    assert subprocess.run([sys.executable, "-c", script], env={**os.environ}, check=False).returncode == 9
    assert [path.name for path in out.iterdir()] == ["selection.json"]
    assert json.loads((out / "selection.json").read_text())["epsilon"] == pytest.approx(COST, abs=5e-4)
    (draw,) = private.rglob("draw.json")
    before = draw.read_text()
    assert oct(draw.stat().st_mode)[-3:] == "600"
    assert oct(draw.parent.stat().st_mode)[-3:] == "700"
    charged = sum(len(Ledger.open(path, read_only=True)) for path in private.rglob("ledger.jsonl"))
    other = sweep(file, "--grid", "algorithm.clip=0.5,3", "--repeats", "3", "--out", out)
    assert "was started with other settings" in str(other.exception)
    assert draw.read_text() == before
    kept = tmp_path / "kept"
    shutil.copytree(draw.parent, kept)
    assert sweep(file, *GRID, "--out", out).exit_code == 0
    assert charged == 6, "nothing was trained again"
    assert outcome(verify_run(out / "best")) == "holds"
    assert (out / "best" / "config.toml").read_bytes() in [path.read_bytes() for path in kept.rglob("config.toml")]


def test_a_selection_whose_private_folder_is_gone_is_refused_and_not_drawn_again(file, tmp_path, private, monkeypatch):
    monkeypatch.setattr("dpfedexp.cli.trials._train", lambda plan, trial, threads: "it broke")
    out = tmp_path / "out"
    failed = sweep(file, *GRID, "--out", out)
    assert "the selection has no run that came to its end: it broke" in str(failed.exception)
    shutil.rmtree(private / "selections")
    refused = sweep(file, *GRID, "--out", out)
    assert (
        f"is missing, so it can't go on. Put it back or set DPFEDEXP_PRIVATE; or name a new folder with --out, and count ε = {COST}"
        in str(refused.exception)
    )


def test_a_run_that_fails_is_the_worst_and_is_not_told_of(file, tmp_path, drawn, monkeypatch):
    """That one of several runs failed is not said, because it would tell of the runs that are not shown."""
    drawn(3)
    trained, train = [], trials._train

    def one_fails(plan, trial, threads):
        trained.append(trial)
        return "it broke" if len(trained) == 2 else train(plan, trial, threads)

    monkeypatch.setattr(trials, "_train", one_fails)
    done = sweep(file, *GRID, "--jobs", "1", "--out", tmp_path / "out")
    assert done.exit_code == 0
    assert len(trained) == 3
    assert "broke" not in done.output + everything(tmp_path / "out")


def test_what_a_crash_made_a_secure_run_pay_again_is_counted(file, tmp_path, private, drawn, monkeypatch):
    """A secure run that is made again after a crash is charged again, and the selection's ε follows."""
    drawn(1)
    train = trials._train

    def charged_again(plan, trial, threads):
        problem = train(plan, trial, threads)
        with Ledger.open(plan.folder(trial) / "ledger.jsonl") as ledger:
            ledger.charge(2, ledger.entries[-1].event, run=ledger.entries[-1].run)
        return problem

    monkeypatch.setattr(trials, "_train", charged_again)
    done = sweep(file, *GRID, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.exception
    best = tmp_path / "out" / "best"
    mu = compose(Ledger.open(best / "ledger.jsonl", read_only=True).charges(), 1e-5).mu
    assert read_claim(best).epsilon_total == selection_epsilon(mu, 1e-5, 3.0) > COST + 1


def test_two_processes_do_not_go_on_with_one_selection(file, tmp_path, drawn, monkeypatch):
    drawn(1)
    train, said = trials._train, []

    def meanwhile(plan, trial, threads):
        if not said:
            said.append("")
            said.append(str(sweep(file, *GRID, "--out", tmp_path / "out").exception))
        return train(plan, trial, threads)

    monkeypatch.setattr(trials, "_train", meanwhile)
    assert sweep(file, *GRID, "--out", tmp_path / "out").exit_code == 0
    assert "another process is running this selection" in said[1]


def test_a_private_folder_inside_the_one_that_is_shown_is_refused(file, tmp_path, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "out" / "private"))
    assert "which is shown; set DPFEDEXP_PRIVATE" in str(sweep(file, *GRID, "--out", tmp_path / "out").exception)
    refused = sweep(file, *GRID, "--out", tmp_path)
    assert "is not empty; name a new one for the selection" in str(refused.exception)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            (*GRID, "--set", "participation.kind=poisson", "--set", "participation.rate=0.5"),
            "needs rounds in which all clients take part; clip=0.5 has participation.kind = 'poisson'",
        ),
        (("--grid", "algorithm.delta=1e-5,1e-6", "--repeats", "3"), "private selection needs algorithm.target_epsilon"),
        (("--repeats", "3"), "--repeats is given without --grid"),
    ],
)
def test_a_selection_whose_cost_is_not_known_is_refused_before_any_run(file, tmp_path, arguments, sentence):
    assert sentence in str(sweep(file, *arguments, "--out", tmp_path / "out").exception)
    assert not (tmp_path / "out").exists()


def test_a_selection_costs_what_its_dearest_setting_does_drawn_or_not(file, tmp_path, drawn, monkeypatch):
    """Drawn are only the cheap ones; that a dear one might have been is part of what is shown."""
    drawn(1)
    monkeypatch.setattr("secrets.SystemRandom.choice", lambda self, grid: grid[0])
    out = tmp_path / "out"
    done = sweep(file, "--grid", "algorithm.target_epsilon=1,8", "--repeats", "3", "--out", out)
    assert done.exit_code == 0, done.output
    assert "ε = 11.271 at δ = 1e-05" in (out / "selection.txt").read_text()
