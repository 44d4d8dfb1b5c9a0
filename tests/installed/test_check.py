"""The check of the wheel can fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.installed.__main__ import main
from tests.installed.check import Failure, check_start, environment, require_files, step, version_of


def test_a_command_that_fails_ends_the_check_with_its_output(tmp_path):
    with pytest.raises(Failure, match="exit code 3\nhalf way"):
        step([sys.executable, "-c", "print('half way'); raise SystemExit(3)"], tmp_path, "a command")


@pytest.mark.parametrize(("text", "sentence"), [(None, "was not written"), ("", "is empty")])
def test_a_file_that_is_missing_or_empty_ends_the_check(tmp_path, text, sentence):
    if text is not None:
        (tmp_path / "report.html").write_text(text)
    with pytest.raises(Failure, match=sentence):
        require_files(tmp_path, "report.html")


def test_an_account_without_its_figure_ends_the_check(tmp_path):
    with pytest.raises(Failure, match="exact ε"):
        check_start(lambda *words: "fit, but no numbers", tmp_path)


def test_commands_do_not_see_the_source_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("DPFEDEXP_PRIVATE", "/elsewhere")
    assert "PYTHONPATH" not in environment(tmp_path)
    assert environment(tmp_path)["DPFEDEXP_PRIVATE"] == str(tmp_path / "private")


def test_a_wheel_that_does_not_exist_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["installed", str(tmp_path / "none.whl")])
    assert main() == 2
    assert "none.whl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dpfedexp-1.2.0.dev0-py3-none-any.whl", "dpfedexp-1.2.0.dev0.tar.gz"])
def test_the_version_is_read_from_the_file_name(name):
    assert version_of(Path(name)) == "1.2.0.dev0"
