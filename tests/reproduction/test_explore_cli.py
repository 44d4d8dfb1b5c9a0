"""`python -m reproduction explore` writes one page."""

from __future__ import annotations

from pathlib import Path

import pytest
from reproduction.__main__ import app
from typer.testing import CliRunner

from dpfedexp.errors import InputError
from dpfedexp.report.document import Section
from reproduction.suite import command

SUITE = Path(__file__).parents[2] / "reproduction" / "experiments" / "suite"


def test_it_writes_the_page_where_it_is_asked_to(tmp_path):
    page = tmp_path / "new" / "explorer.html"
    done = CliRunner().invoke(app, ["explore", "--out", str(page), "--suite", str(SUITE)])
    assert done.exit_code == 0, done.output
    assert str(page) in done.output.replace("\n", "")
    html = page.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>")
    assert "shakespeare" in html


def test_a_folder_without_results_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="is not a section of a report"):
        command.explore(tmp_path / "explorer.html", tmp_path)
    empty = Section("suite", "empty", ("", ""))
    (tmp_path / "suite.json").write_text(empty.to_json(), encoding="utf-8")
    with pytest.raises(InputError, match="no results against ε; `python -m reproduction suite --recorded"):
        command.explore(tmp_path / "explorer.html", tmp_path)
