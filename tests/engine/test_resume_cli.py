"""`dpfedexp train --resume` as a user meets it."""

import json

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dpfedexp.accounting import Ledger
from dpfedexp.cli import app
from dpfedexp.engine import checkpoint
from dpfedexp.engine.run import RunFolder
from dpfedexp.errors import InputError
from tests.engine.small import Crash

TOML = """
data = { kind = "synthetic", clients = 10, dimension = 4 }
algorithm = { name = "cdp_fedexp", clip = 0.3, noise_multiplier = 2.0 }
local = { lr = 0.01, steps = 2 }
run = { rounds = 5, device = "cpu" }
"""


@pytest.fixture
def call(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)

    def call(folder, *more, catch=False):
        done = CliRunner().invoke(
            app, ["train", str(tmp_path / "run.toml"), "--out", str(tmp_path / folder), "--quiet", *more]
        )
        if not catch and done.exception is not None:
            raise done.exception
        return done

    return call


def records(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "seconds"} for line in lines]


def test_an_interrupted_run_goes_on_and_ends_like_a_whole_one(call, tmp_path, monkeypatch):
    call("whole")
    broken = tmp_path / "broken"
    with monkeypatch.context() as patch:

        def torn(self, line):
            if line["round"] == 3:
                (self.path / "metrics.jsonl").open("a").write('{"round": 3, "eta')
                raise Crash
            original(self, line)

        original = RunFolder.record
        patch.setattr(RunFolder, "record", torn)
        with pytest.raises(Crash):
            call("broken")
    assert not (broken / "model.safetensors").exists()
    call("broken", "--resume")
    assert records(broken) == records(tmp_path / "whole")
    for name in ("privacy.json", "config.toml"):
        assert (broken / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    books = [Ledger.open(folder / "ledger.jsonl", read_only=True) for folder in (broken, tmp_path / "whole")]
    charges = [[(entry.round, entry.event, entry.noise) for entry in book.entries] for book in books]
    assert charges[0] == charges[1]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (broken, tmp_path / "whole"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_resume_leaves_a_folder_alone_that_holds_something_else(call, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"")
    with pytest.raises(InputError, match="holds files but no run"):
        call("photos", "--resume")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["cat.png"]


def test_resuming_with_other_settings_names_them_as_the_file_does(call, tmp_path):
    call("run")
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(
        InputError, match=r"algorithm\.clip is 0\.4 here and 0\.3 there; run\.seed is 2 here and 0 there"
    ):
        call("run", "--resume", "--set", "algorithm.clip=0.4", "--set", "run.seed=2")
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_resume_without_a_folder_is_one_sentence(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.toml"), "--resume"])
    assert "--out must name the folder" in str(done.exception)


def test_a_second_run_in_the_same_folder_leaves_the_metrics_of_the_first_alone(call, tmp_path, monkeypatch):
    original = RunFolder.record

    def meddled(self, line):
        original(self, line)
        if line["round"] == 3:
            done = call("run", "--resume", catch=True)
            assert "in use by another run" in str(done.exception)

    monkeypatch.setattr(RunFolder, "record", meddled)
    call("run")
    assert [line["round"] for line in records(tmp_path / "run")] == [1, 2, 3, 4, 5]
    assert checkpoint.read_progress(tmp_path / "run").round == 5
