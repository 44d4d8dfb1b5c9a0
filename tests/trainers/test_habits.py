"""The files about the project say the same as the project."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import dpfedexp
from tests.covered import summary

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[1]


def rule(target: str) -> list[str]:
    """The commands of a rule of the Makefile."""
    text = (ROOT / "Makefile").read_text()
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", text, flags=re.MULTILINE)
    assert found, f"the Makefile has no rule {target}"
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_the_hooks_run_the_commands_of_make_lint():
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repo["repo"] == "local"
    assert [hook["entry"] for hook in repo["hooks"]] == rule("lint")
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in repo["hooks"])


def test_continuous_integration_lints_tests_builds_the_site_and_installs_the_wheel():
    targets = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    assert targets == ["lint", "test", "docs", "wheel-check"]
    assert "make test COVERAGE=1" in (ROOT / ".ci" / "run").read_text()


def test_coverage_is_of_the_tests_that_make_test_runs():
    assert rule("coverage") == ["@$(MAKE) --no-print-directory test COVERAGE=1"]
    assert rule("test")[0].endswith("$(if $(COVERAGE),--cov --cov-report=)")


def test_the_citation_is_complete_and_names_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == dpfedexp.__version__
    paper = citation["preferred-citation"]
    assert {"type", "title", "authors"} <= paper.keys()
    assert [author["family-names"] for author in paper["authors"]] == ["Takakura", "Liew", "Hasegawa"]


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_of_the_page_lead_to_files(name):
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_makefile_targets_that_contributors_are_told_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    told = set(re.findall(r"^make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(), flags=re.MULTILINE))
    assert told
    assert told <= targets


def test_the_changelog_has_a_place_for_what_is_not_released():
    titles = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert titles[0] == "Unreleased"


def test_the_summary_of_coverage_names_files_below_80_percent_the_worst_first():
    def share(percent: float) -> dict:
        return {"summary": {"percent_covered": percent}}

    files = {"a.py": share(79.9), "b.py": share(80.0), "c.py": share(12.5), "d.py": share(100.0)}
    totals = {"percent_covered": 88.0, "covered_lines": 88, "num_statements": 100}
    assert summary({"files": files, "totals": totals}) == [
        " 12.5%  c.py",
        " 79.9%  a.py",
        " 88.0%  in all: 88 of 100 statements in 4 files; 2 below 80%",
    ]
