"""What is committed is what its records say: tables, charts, claims, page and figures are rebuilt and compared."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import matplotlib
import pytest
from reproduction.paper import SECTIONS, sections
from reproduction.paper.results import record as recording
from reproduction.paper.results.collected import file_of, images_of, key_of
from reproduction.paper.results.record import MNIST
from reproduction.paper.results.size import Size
from reproduction.suite import command, suite_page, tuned
from reproduction.suite.overview import overview
from reproduction.suite.problems import PROBLEMS
from reproduction.suite.suite_runs import Lines, Place

from dpfedexp.engine import plot
from dpfedexp.report.page import saved_sections
from tests.sizes import long, sized

COMMITTED = Path(__file__).parents[2] / "reproduction" / "experiments" / "results"
SIZE = Size(seeds=5)
LARGE = ("grid", "beyond")


def same(ours: Any, theirs: Any) -> bool:
    """Equal, but for the last digits of sums and logarithms, which another processor may round another way."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return ours.keys() == theirs.keys() and all(same(ours[name], theirs[name]) for name in ours)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, float) and isinstance(theirs, float):
        return math.isclose(ours, theirs, rel_tol=1e-9, abs_tol=1e-12)
    return ours == theirs


def saved(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[long] if name in LARGE else []) for name in SECTIONS])
def test_every_table_is_rebuilt_from_the_records_alone(name, monkeypatch):
    monkeypatch.setenv("DPFEDEXP_DATA", "/nowhere")
    (section,) = sections.rebuild([name], SIZE, COMMITTED)
    ours = json.loads(section.to_json())
    for part, value in saved(COMMITTED / f"{name}.json").items():
        assert same(ours[part], value), (
            f"{part}: python -m reproduction paper all --recorded --out reproduction/experiments/results"
        )


def test_a_number_in_a_record_reaches_the_table(tmp_path):
    """The comparison above can fail: one accuracy changed by a hundredth of a point is another table."""
    records = recording.read(file_of(COMMITTED, "mnist"))
    records[0].finals["test_accuracy"] += 5e-4
    recording.write(file_of(tmp_path, "mnist"), records)
    (section,) = sections.rebuild(["mnist"], SIZE, tmp_path)
    assert not same(json.loads(section.to_json())["tables"], saved(COMMITTED / "mnist.json")["tables"])


def test_the_page_is_rebuilt_from_the_committed_sections_and_links_no_file_that_is_not_committed(tmp_path, monkeypatch):
    folder = tmp_path / "reproduction" / "experiments" / "results"
    folder.mkdir(parents=True)
    for file in (*COMMITTED.glob("*.json"), *COMMITTED.glob("*.svg")):
        shutil.copy(file, folder)
    monkeypatch.chdir(tmp_path)
    page = sections.write_page(Path("reproduction/experiments/results"))
    assert page.read_text(encoding="utf-8") == (COMMITTED / "report.html").read_text(encoding="utf-8")


def test_every_figure_is_drawn_from_the_committed_sections(tmp_path, monkeypatch):
    charts = [chart for section in saved_sections(COMMITTED) for chart in section.charts]
    assert {path.stem for path in COMMITTED.glob("*.svg")} == {chart.name for chart in charts}
    made_with = {re.search(r"Matplotlib v([\d.]+)", path.read_text()).group(1) for path in COMMITTED.glob("*.svg")}
    if made_with != {matplotlib.__version__.rpartition("+")[0] or matplotlib.__version__}:
        pytest.skip(f"the figures were drawn with matplotlib {', '.join(sorted(made_with))}, which draws other lines")
    # The layout is settled by whichever format is drawn first, so it is the same here as in `draw`.
    monkeypatch.setattr(plot, "FORMATS", ("png", "svg"))
    for chart in charts[:: sized(9, 1)]:
        _, path = plot.draw(chart, tmp_path)
        check_drawing(path, COMMITTED / path.name, 1e-4)


def check_drawing(ours: Path, theirs: Path, tolerance: float) -> None:
    """The same texts and nearly the same places: a processor has last bits of its own, and hashes of them name a figure's parts."""
    words, places = [], []
    for text in (ours.read_text(), theirs.read_text()):
        for number, name in enumerate(dict.fromkeys(re.findall(r'\bid="([pmC][0-9a-f_]{8,})"', text))):
            text = text.replace(name, f"part-{number}")
        words.append(re.split(r"-?\d+\.\d+", text))
        places.append([float(found) for found in re.findall(r"-?\d+\.\d+", text)])
    assert words[0] == words[1], theirs
    assert places[0] == pytest.approx(places[1], abs=tolerance), theirs


@pytest.mark.parametrize("name", [name for name in SECTIONS if name != "table1"])
def test_every_planned_run_has_one_record_and_every_record_its_provenance(name):
    records = recording.read(file_of(COMMITTED, name))
    images = images_of(records)
    assert images in (None, MNIST)
    planned = {key_of(run, images) for run in sections.MAKERS[name].planned(SIZE)}
    assert sorted(record.key for record in records) == sorted(planned)
    for record in records:
        made = [record.commit, record.dirty, record.versions, record.device]
        assert record.section == name
        if record.recorded_in is None:
            assert None not in [*made, record.seconds], record.name
            assert re.fullmatch("[0-9a-f]{40}", record.commit)
            assert {"dpfedexp", "torch", "numpy", "python"} <= record.versions.keys()
            assert record.dirty is False, "a committed result comes from committed source"
        else:
            # From before these lines: what was never recorded is null, not made up later.
            assert re.fullmatch("[0-9a-f]{40}", record.recorded_in["commit"])
            assert record.recorded_in["file"].startswith("experiments/results/")
            assert made == [None] * 4


SUITE = Path(__file__).parents[2] / "reproduction" / "experiments" / "suite"
AGAIN = "python -m reproduction suite --recorded --out reproduction/experiments/suite"


@long
def test_tables_charts_and_numbers_are_rebuilt_from_the_records_alone(tmp_path):
    rebuilt = suite_page.section(list(PROBLEMS), command.size(quick=False, seeds=3), Lines(SUITE).result)
    committed = saved(SUITE / "suite.json")
    for part, value in json.loads(rebuilt.to_json()).items():
        assert same(value, committed[part]), f"{part}: {AGAIN}"
    assert suite_page.write_markdown(rebuilt, tmp_path).read_text("utf-8") == (SUITE / "suite.md").read_text("utf-8"), (
        AGAIN
    )


def test_the_picture_of_the_readme_is_drawn_from_the_committed_results(tmp_path):
    """To a pixel; it is made by `python -m reproduction overview`."""
    check_drawing(overview(SUITE, tmp_path / "new.svg"), SUITE / "overview.svg", 1.0)


@long
def test_the_comparison_with_tuned_rivals_is_what_its_records_say(tmp_path):
    committed, name = SUITE.parent / "tuned", "tuned-held-out.md"
    shutil.copytree(committed / "suite", tmp_path / "suite")
    tuned.compare("held-out", [], tuned.SEEDS, Place(), tmp_path, recorded=True, say=pytest.fail)
    again = "python -m reproduction tuned held-out --recorded --out reproduction/experiments/tuned"
    assert (tmp_path / name).read_text("utf-8") == (committed / name).read_text("utf-8"), again
