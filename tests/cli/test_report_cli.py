"""`dpfedexp report` from the outside, on what `dpfedexp train` really writes."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dpfedexp.cli import app
from dpfedexp.errors import InputError

FAST = [
    "--set",
    "run.rounds=3",
    "--set",
    "data.clients=20",
    "--set",
    "data.dimension=5",
    "--set",
    "local.steps=2",
    "--quiet",
]


def call(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def test_train_then_report(tmp_path):
    assert call("init", tmp_path / "my.toml").exit_code == 0
    for name in ("a", "b"):
        assert call("train", tmp_path / "my.toml", *FAST, "--out", tmp_path / "sweep" / name).exit_code == 0
    done = call("report", tmp_path / "sweep" / "a")
    assert done.exit_code == 0
    assert "report.html" in done.output
    text = (tmp_path / "sweep" / "a" / "report.html").read_text(encoding="utf-8")
    assert (tmp_path / "sweep" / "a" / "privacy.txt").read_text(encoding="utf-8").splitlines()[0] in text
    assert "adaptive" in text
    assert call("report", tmp_path / "sweep").exit_code == 0
    assert "2 runs side by side" in (tmp_path / "sweep" / "report.html").read_text(encoding="utf-8")


def test_an_empty_folder_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="holds no results"):
        call("report", tmp_path)
