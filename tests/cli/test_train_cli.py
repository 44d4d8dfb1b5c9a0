import json
import warnings

import pytest
from safetensors.torch import load_file

from dpfedexp import cli

FAST = ["--set=run.rounds=3", "--set=data.clients=20", "--set=data.dimension=5", "--set=local.steps=2", "--quiet"]


@pytest.fixture
def dpfedexp(tmp_path, monkeypatch, capfd, undrawn, in_process):
    """The command line in the test's folder: its exit code and what it said."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)

    def run(*arguments):
        monkeypatch.setattr("sys.argv", ["dpfedexp", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, capfd.readouterr()

    return run


def test_a_run_that_stops_early_does_not_exit_with_0(tmp_path, dpfedexp):
    assert dpfedexp("init", "my.toml")[0] == 0
    code, said = dpfedexp("train", "my.toml", *FAST, "--set=run.budget=7", "--out", "run")
    assert code == 3, said.err
    assert "Stopped early: the budget is epsilon 7" in said.out
    code, said = dpfedexp("sweep", "my.toml", *FAST[:-1], "--set=run.budget=7", "--out", "sweep", "--jobs", "1")
    assert code == 0, "a sweep has their results"


def test_init_then_train_writes_everything_that_it_names(tmp_path, dpfedexp):
    assert dpfedexp("init", "my.toml")[0] == 0
    code, said = dpfedexp("train", "my.toml", *FAST, "--out", "run")
    assert code == 0, said.err
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3]
    assert (folder / "metrics.csv").read_text().startswith("round,distance,eta_g")
    assert load_file(folder / "model.safetensors")["weight"].shape == (1, 5)
    statement = json.loads((folder / "privacy.json").read_text())
    assert statement["epsilon_total"] == pytest.approx(8.0, rel=1e-3)
    assert "8.00" in (folder / "privacy.txt").read_text()
    assert "[resolved]" in (folder / "config.toml").read_text()
    assert dpfedexp("privacy", "verify", "run")[0] == 0
    assert dpfedexp("report", "run")[0] == 0
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert (folder / "privacy.txt").read_text(encoding="utf-8").splitlines()[0] in text
    assert "adaptive" in text
    code, said = dpfedexp("train", "my.toml", *FAST, "--out", "run")
    assert code == 0
    assert "holds this run, which is complete: no round is made" in said.err
    code, said = dpfedexp("train", "my.toml", *FAST, "--set", "run.seed=5", "--out", "run")
    assert code == 2
    assert "run.seed is 5 here and 0 there" in said.err
