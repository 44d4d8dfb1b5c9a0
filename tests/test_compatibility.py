"""What the project says about versions: a table, a date and a changelog."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import dpfedexp
from tests.release.changelog import UNRELEASED, sections

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BEGIN, END = "<!-- begin: versions -->", "<!-- end: versions -->"
NOT_TO_RUN = {"dev", "docs"}
"""Extras for working on the project."""


def table() -> str:
    """The table of versions in docs/compatibility.md, as the two files have it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    rows = ["| | accepted | tests run with | needed for |", "|---|---|---|---|"]
    rows.append(f"| Python | {PROJECT['requires-python']} | 3.11 | everything |")
    extras = {name: lines for name, lines in PROJECT["optional-dependencies"].items() if name not in NOT_TO_RUN}
    for purpose, needed in {"everything": PROJECT["dependencies"], **extras}.items():
        for one in map(Requirement, needed):
            accepted = ", ".join(sorted(map(str, one.specifier), reverse=True))
            tested = fixed.get(canonicalize_name(one.name), "not fixed")
            label = purpose if purpose == "everything" else f"`dpfedexp[{purpose}]`"
            rows.append(f"| {one.name} | {accepted} | {tested} | {label} |")
    return "\n".join(rows)


def test_the_page_has_the_versions_of_the_project():
    page = (ROOT / "docs" / "compatibility.md").read_text()
    written = page.partition(BEGIN)[2].partition(END)[0].strip()
    assert written == table(), f"docs/compatibility.md must have this table:\n{table()}"


def test_the_citation_has_the_date_of_this_version_and_none_before_there_is_one():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    dates = {section.name: section.date for section in sections((ROOT / "CHANGELOG.md").read_text())}
    assert str(citation.get("date-released")) == str(dates.get(dpfedexp.__version__))


def test_the_citation_names_the_paper():
    paper = yaml.safe_load((ROOT / "CITATION.cff").read_text())["preferred-citation"]
    assert paper["title"] == "Accelerating Differentially Private Federated Learning via Adaptive Extrapolation"
    assert paper["type"] == "conference-paper"
    assert paper["year"] == 2025


def test_the_changelog_is_by_version_the_newest_first_and_each_has_a_date():
    first, *released = sections((ROOT / "CHANGELOG.md").read_text())
    assert (first.name, first.date) == (UNRELEASED, None)
    versions = [Version(section.name) for section in released]
    assert versions == sorted(versions, reverse=True)
    assert all(section.date for section in released)
    assert Version(dpfedexp.__version__) >= versions[0]


def test_a_tree_with_unreleased_changes_is_a_version_that_was_not_released():
    first, *released = sections((ROOT / "CHANGELOG.md").read_text())
    if first.text:
        assert Version(dpfedexp.__version__).is_devrelease
    else:
        assert Version(dpfedexp.__version__) >= Version(released[0].name)
