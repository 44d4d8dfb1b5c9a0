"""A run from Python leaves the folder that the command line leaves, and what is missing in one is not taken for a lie."""

import json
import shutil
from unittest import mock

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from dpfedexp import InputError, Run, fit
from dpfedexp.cli import app
from dpfedexp.engine import checkpoint
from dpfedexp.engine.run import RunFolder
from dpfedexp.engine.verify import outcome, read_claim, verify_run
from dpfedexp.report.page import read_run, run_section
from tests.engine.small import ROUNDS, Crash, crash_after, crash_in, federation, network, small_run, weights

TOML = """
[data]
clients = 20
dimension = 5
[algorithm]
clip = 0.3
noise_multiplier = 4.0
[run]
rounds = 3
"""


def call(*arguments):
    words = [str(one) for one in arguments]
    with mock.patch("sys.argv", ["dpfedexp", *words]):
        return CliRunner().invoke(app, words)


def train(tmp_path, folder, *more, catch=False):
    """`dpfedexp train`, whose refusal is raised here."""
    (tmp_path / "my.toml").write_text(TOML)
    done = call("train", tmp_path / "my.toml", "--out", tmp_path / folder, "--quiet", *more)
    if not catch and done.exception is not None:
        raise done.exception
    return done


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original") / "run"
    return small_run(out=folder), folder


@pytest.fixture
def written(original, tmp_path):
    """A finished run, and a copy of its folder for the test alone."""
    run, folder = original
    return run, shutil.copytree(folder, tmp_path / "run")


def test_python_and_the_command_line_write_the_same_files(written, tmp_path):
    train(tmp_path, "cli", "--set", "run.seed=3")
    theirs = {path.name for path in (tmp_path / "cli").iterdir()}
    assert {path.name for path in written[1].iterdir()} == theirs - {"config.toml"}
    ours, other = (json.loads((folder / "run.json").read_text()) for folder in (written[1], tmp_path / "cli"))
    assert ours.keys() == other.keys()
    assert other["command"].startswith("dpfedexp train ")
    for word in ("--set run.seed=3", "--quiet", f"--out {tmp_path / 'cli'}"):
        assert word in other["command"]
    call_text = "train(Sequential, Federation, cdp_fedexp(clip=0.3, noise_multiplier=4.0), local=Sgd("
    assert ours["command"].startswith(call_text)
    assert (ours["clients"], ours["parameters"], ours["rounds"], ours["model"]) == (12, 4, ROUNDS, "Sequential")
    assert call("privacy", "verify", written[1]).exit_code == 0
    assert call("report", written[1]).exit_code == 0
    epsilon = f"{written[0].privacy.epsilon_total:.3f}"
    name = f"cdp_fedexp on a Federation from Python: M = 12 clients, d = 4 parameters, ε = {epsilon} at δ = 1e-05."
    assert name in (written[1] / "report.html").read_text(encoding="utf-8")


def test_a_folder_without_its_statement_is_incomplete_and_that_hides_nothing_that_is_false(written):
    folder = written[1]
    for name in ("privacy.json", "privacy.txt"):
        (folder / name).unlink()
    page = read_run(folder)
    assert len(page.history) == ROUNDS
    assert "M = 12 clients" in page.title()
    done = call("privacy", "verify", folder)
    assert done.exit_code == 4
    assert "DOES NOT HOLD" not in done.output
    assert "privacy.json" in done.output
    assert outcome(verify_run(folder)) == "incomplete"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"round": 99}\n')
    assert call("privacy", "verify", folder).exit_code == 1


def test_a_claim_without_its_ledger_can_not_be_checked(written):
    (written[1] / "ledger.jsonl").unlink()
    (check,) = verify_run(written[1])
    assert not check.passed
    assert check.incomplete
    assert "taken away" in check.detail
    assert call("privacy", "verify", written[1]).exit_code == 4


def test_fit_writes_the_statement_that_it_returns_and_its_page_says_fit(tmp_path):
    folder = tmp_path / "run"
    run = fit(network(), federation(), epsilon=8.0, rounds=2, out=folder, execution="cpu")
    assert run.privacy.choices
    assert read_claim(folder) == run.privacy
    assert outcome(verify_run(folder)) == "holds"
    assert run.facts.command == "fit(Sequential, Federation, epsilon=8.0, rounds=2, execution='cpu')"
    assert json.loads((folder / "run.json").read_text())["command"] == run.facts.command
    assert run_section(read_run(folder)).command == run.facts.command


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"out": "photos"}, "holds files but no run"),
        ({"out": "photos/cat.png/run"}, "can't be written"),
        ({"out": 3}, "out is 3; it must be the path of a folder"),
        ({"out": "new", "checkpoint": "other"}, r"train has no argument 'checkpoint'\. Write out"),
    ],
)
def test_a_folder_that_can_not_be_written_to_gets_one_sentence(tmp_path, options, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(InputError, match=words):
        small_run(**options)


@pytest.mark.parametrize("from_disk", [True, False])
def test_a_saved_run_is_the_same_run(from_disk, tmp_path):
    """Whether its ledger lay in a file or in memory."""
    run = small_run(out=tmp_path / "first") if from_disk else small_run()
    folder = run.save(tmp_path / "saved")
    loaded = Run.load(folder, network())
    for name in ("privacy", "history", "facts", "advice"):
        assert getattr(loaded, name) == getattr(run, name)
    assert loaded.ledger.charges() == run.ledger.charges()
    assert torch.equal(loaded.model(torch.eye(3)), run.model(torch.eye(3)))
    assert outcome(verify_run(folder)) == "holds"
    bare = Run.load(folder)
    assert bare.model.state_dict().keys() == run.model.state_dict().keys()
    with pytest.raises(InputError, match=r"Run\.load\(folder, model="):
        bare.model(torch.eye(3))


def test_a_folder_in_use_is_not_saved_to_and_an_empty_one_not_loaded(written, tmp_path):
    with pytest.raises(InputError, match="is not empty"):
        written[0].save(written[1])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no run was begun in it"):
        Run.load(tmp_path / "empty")


def test_a_script_that_makes_a_new_random_model_resumes_from_the_folder_alone(tmp_path):
    """But not with other buffers, even where no state dict holds them."""

    def scaled(scale, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        model.register_buffer("scale", torch.tensor(scale), persistent=False)
        return model

    whole = small_run(out=tmp_path / "whole", model=scaled(1.0, 0))
    with pytest.raises(Crash):
        small_run(out=tmp_path / "killed", model=scaled(1.0, 0), on_round=crash_after(2))
    for other in (scaled(-5.0, 0), network()):
        with pytest.raises(InputError, match="frozen parameters or buffers are not those that the run began with"):
            small_run(out=tmp_path / "killed", model=other)
    again = small_run(out=tmp_path / "killed", model=scaled(1.0, 1))
    assert torch.equal(weights(again), weights(whole))
    assert again.privacy == whole.privacy


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_an_interrupted_command_goes_on_and_ends_like_a_whole_one(tmp_path, monkeypatch):
    train(tmp_path, "whole")
    broken = tmp_path / "broken"
    with monkeypatch.context() as patch:
        crash_in(patch, RunFolder, "record", 2, before=True)
        with pytest.raises(Crash):
            train(tmp_path, "broken")
    with (broken / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "eta')
    assert not (broken / "model.safetensors").exists()
    train(tmp_path, "broken")
    assert records(broken) == records(tmp_path / "whole")
    for name in ("privacy.json", "config.toml", "model.safetensors"):
        assert (broken / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_second_run_in_the_same_folder_leaves_the_metrics_of_the_first_alone(tmp_path, monkeypatch):
    original = RunFolder.record

    def meddled(self, line):
        original(self, line)
        if line["round"] == 2:
            done = train(tmp_path, "run", catch=True)
            assert "in use by another run" in str(done.exception)

    monkeypatch.setattr(RunFolder, "record", meddled)
    train(tmp_path, "run")
    assert [line["round"] for line in records(tmp_path / "run")] == [1, 2, 3]
    assert checkpoint.read_progress(tmp_path / "run").round == 3
