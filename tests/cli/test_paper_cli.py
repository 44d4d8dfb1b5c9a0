"""`dpfedexp paper` from the outside."""

from __future__ import annotations

import json

import pytest
from tests.paper.fabricated import Counting
from typer.testing import CliRunner

from dpfedexp.cli import app
from dpfedexp.errors import InputError
from dpfedexp.paper import parts
from dpfedexp.paper.parts import Part
from dpfedexp.paper.store import Store
from dpfedexp.report.document import Section, Table


def call(*arguments: object):
    return CliRunner().invoke(app, ["paper", *map(str, arguments)], catch_exceptions=False)


def test_table1_shows_the_printed_numbers_and_writes_json_and_page(tmp_path):
    done = call("table1", "--out", tmp_path / "out")
    assert done.exit_code == 0
    assert "15.456" in done.output
    assert "15.258" in done.output
    assert json.loads((tmp_path / "out" / "table1.json").read_text())["name"] == "table1"
    assert "Table 1" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_parts_run_their_cells_once_and_goes_on_after_an_interruption(tmp_path, monkeypatch):
    cells = [Counting(name, str(tmp_path)) for name in "ab"]

    def section(scale, results):
        rows = [[cell.name, results[cell]["value"]] for cell in cells]
        return Section("tiny", "Tiny", tables=[Table("t", ["cell", "value"], rows)], command=scale.command("tiny"))

    monkeypatch.setattr(parts, "PARTS", {"table1": Part(lambda scale: cells, section)})
    (tmp_path / "b-fails").touch()
    with pytest.raises(RuntimeError):
        call("table1", "--out", tmp_path / "out", "--jobs", 1)
    (tmp_path / "b-fails").unlink()
    for _ in range(2):
        assert call("table1", "--out", tmp_path / "out", "--jobs", 1).exit_code == 0
    assert [cell.times for cell in cells] == [1, 1]
    assert (tmp_path / "out" / "tiny.json").is_file()


def test_an_unknown_part_names_those_that_exist():
    done = call("table9")
    assert done.exit_code == 2
    assert "step-history" in done.output


def test_without_the_images_one_sentence_says_where_to_put_them(tmp_path):
    with pytest.raises(InputError, match="train-images-idx3-ubyte"):
        call("mnist", "--quick", "--data", tmp_path, "--out", tmp_path / "out", "--device", "cpu")


def test_an_output_folder_that_is_a_file_is_one_sentence(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        call("table1", "--out", tmp_path / "out")


def test_a_store_refuses_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "cells").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        Store(tmp_path / "cells").run([Counting("a", str(tmp_path))], "cells")
