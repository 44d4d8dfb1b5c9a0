"""`python -m reproduction paper` from the outside."""

from __future__ import annotations

import json

import pytest
from reproduction.__main__ import app
from reproduction.paper.results.collected import Cache
from reproduction.paper.results.planned import Place
from reproduction.paper.sections import Maker
from typer.testing import CliRunner

from dpfedexp.errors import InputError
from dpfedexp.report.document import Section, Table
from reproduction.paper import SECTIONS, sections
from tests.reproduction.paper.fabricated import Counting


def call(*arguments: object):
    return CliRunner().invoke(app, ["paper", *map(str, arguments)], catch_exceptions=False)


def test_table1_shows_the_printed_numbers_and_writes_json_and_page(tmp_path):
    done = call("table1", "--out", tmp_path / "out")
    assert done.exit_code == 0
    assert "15.456" in done.output
    assert "15.258" in done.output
    assert json.loads((tmp_path / "out" / "table1.json").read_text())["name"] == "table1"
    assert "Table 1" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_the_parts_that_the_command_offers_are_those_that_are_made():
    assert tuple(SECTIONS) == tuple(sections.MAKERS)


@pytest.fixture
def tiny(tmp_path, monkeypatch) -> list[Counting]:
    """Table 1 replaced by a section of two runs."""
    runs = [Counting(name, str(tmp_path)) for name in "ab"]

    def section(size, results):
        rows = [[run.name, results[run]["curves"]["value"][0]] for run in runs]
        return Section("table1", "Tiny", tables=[Table("t", ["run", "value"], rows)], command=size.command("table1"))

    monkeypatch.setattr(sections, "MAKERS", {"table1": Maker(lambda size: list(runs), section)})
    return runs


def test_an_interrupted_sweep_goes_on_and_leaves_its_records_and_no_cache(tmp_path, tiny):
    out = tmp_path / "out"
    (tmp_path / "b-fails").touch()
    with pytest.raises(RuntimeError, match="interrupted"):
        call("table1", "--out", out, "--jobs", 1)
    assert len(list((out / ".cache").iterdir())) == 1
    (tmp_path / "b-fails").unlink()
    for _ in range(2):
        assert call("table1", "--out", out, "--jobs", 1).exit_code == 0
    assert [run.times for run in tiny] == [1, 1]
    assert len((out / "table1" / "runs.jsonl").read_text().splitlines()) == 2
    assert not (out / ".cache").exists()
    assert call("table1", "--out", out, "--recorded").exit_code == 0


def test_a_changed_default_is_run_anew_and_the_sentence_says_which(tmp_path, tiny):
    out = tmp_path / "out"
    call("table1", "--out", out, "--jobs", 1)
    tiny[0] = Counting("a", str(tmp_path), default=2)
    with pytest.raises(InputError, match=r"1 of the 2 runs .*counting.default is 2 now and was 1.*--recorded"):
        call("table1", "--out", out, "--recorded")
    done = call("table1", "--out", out, "--jobs", 1)
    assert (
        "table1: 1 of the 2 runs are not recorded. 'a': the nearest record is 'a', but counting.default is 2"
        in done.stderr
    )
    assert (tiny[0].times, tiny[1].times) == (2, 1)


def test_recorded_without_records_is_one_sentence(tmp_path, tiny):
    with pytest.raises(InputError, match=r"2 of the 2 runs of 'table1' are not recorded.*nothing is recorded"):
        call("table1", "--out", tmp_path / "out", "--recorded")


@pytest.mark.parametrize("name", ["figure1", "figure2", "figure3", "table2", "table3"])
def test_what_the_paper_calls_a_section_is_a_name_for_it(name, tmp_path):
    with pytest.raises(InputError, match="not recorded"):
        call(name, "--out", tmp_path, "--recorded")


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


def test_a_cache_refuses_a_folder_that_is_a_file(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(InputError, match="can't be written"):
        Cache(tmp_path / "cache").run({"key": Counting("a", str(tmp_path))}, None, Place("cpu", jobs=1))
