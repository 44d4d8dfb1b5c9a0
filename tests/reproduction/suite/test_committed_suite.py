"""What `reproduction/experiments/suite` shows is what its records say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from reproduction.suite.problems import PROBLEMS
from reproduction.suite.run import Lines

from dpfedexp.report.document import Section
from reproduction.suite import command, page
from tests.reproduction.paper.test_committed_results import same

COMMITTED = Path(__file__).parents[3] / "reproduction" / "experiments" / "suite"
AGAIN = "python -m reproduction suite --recorded --out reproduction/experiments/suite"


@pytest.fixture(scope="module")
def rebuilt() -> Section:
    return page.section(list(PROBLEMS), command.size(quick=False, seeds=3), Lines(COMMITTED).result)


def test_tables_charts_and_numbers_are_rebuilt_from_the_records_alone(rebuilt, tmp_path):
    committed = json.loads((COMMITTED / "suite.json").read_text(encoding="utf-8"))
    for part, value in json.loads(rebuilt.to_json()).items():
        assert same(value, committed[part]), f"{part}: {AGAIN}"
    assert page.write_markdown(rebuilt, tmp_path).read_text(encoding="utf-8") == (COMMITTED / "suite.md").read_text(
        encoding="utf-8"
    ), AGAIN


def test_the_explorers_numbers_are_those_of_the_tables(rebuilt):
    """Every mean and every server rate that the tables show is among the numbers against ε, and no other."""
    shown = {}
    for table in rebuilt.tables:
        if found := re.fullmatch(r"ε = (\d+)", table.title):
            for name, _, *cells in table.rows:
                for label, cell in zip(table.columns[2:-1], cells[:-1], strict=True):
                    rate = re.search(r"\[(.+)\]", cell)
                    shown[name, label, float(found[1])] = float(cell.split()[0]), float(rate[1]) if rate else None
    numbers = {
        (problem["name"], contender["label"], point["epsilon"]): (point["mean"], point["server_rate"])
        for problem in rebuilt.data["problems"]
        for contender in problem["contenders"]
        for point in contender["points"]
    }
    assert numbers.keys() == shown.keys()
    for key, (mean, rate) in numbers.items():
        assert mean == pytest.approx(shown[key][0], abs=0.0051 if mean > 2 else 0.000051), key
        assert rate == shown[key][1], key
