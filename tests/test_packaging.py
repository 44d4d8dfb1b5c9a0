"""What is built holds what is in the tree, under one version, and the project says which versions it takes."""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import dpfedexp

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "dpfedexp"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def build(tree: Path, kind: str, folder: Path) -> Path:
    """The wheel or the source distribution of a tree, by setuptools as every front end calls it."""
    code = f"from setuptools.build_meta import build_{kind} as build; import sys; print(build(sys.argv[1]))"
    folder.mkdir(exist_ok=True)
    words, known = [sys.executable, "-c", code, str(folder)], os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(words, cwd=tree, capture_output=True, text=True, env=known)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The source distribution of a copy of the tree, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("built")
    copy = folder / "copy"
    everywhere = shutil.ignore_patterns(".*", "*.egg-info", "__pycache__")
    outside = {"build", "dist", "site-build", "tests", "reproduction", "runs"}

    def ignored(folder: str, names: list[str]) -> set[str]:
        return everywhere(folder, names) | (outside if folder == str(ROOT) else set())

    shutil.copytree(ROOT, copy, ignore=ignored)
    sdist = build(copy, "sdist", folder / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    return {"sdist": sdist, "wheel": build(unpacked, "wheel", folder / "wheel")}


def test_the_wheel_of_the_source_distribution_holds_every_file_of_the_package(built):
    with zipfile.ZipFile(built["wheel"]) as archive:
        shipped = {name: archive.read(name) for name in archive.namelist() if name.startswith("dpfedexp/")}
    # Without what Python and editors leave behind.
    paths = [path for path in PACKAGE.rglob("*") if path.is_file() and not path.name.startswith(".")]
    written = {
        f"dpfedexp/{path.relative_to(PACKAGE).as_posix()}": path for path in paths if path.parent.name != "__pycache__"
    }
    assert written.keys() == shipped.keys() >= {"dpfedexp/py.typed"}
    assert [name for name, path in written.items() if path.read_bytes() != shipped[name]] == []


def test_the_source_distribution_holds_what_a_reader_needs_in_the_version_of_the_package(built):
    with tarfile.open(built["sdist"]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    pages = {f"{page}.md" for page in ("README", "CHANGELOG", "SECURITY", "CONTRIBUTING", "docs/security")}
    assert pages | {"LICENSE", "CITATION.cff", "constraints.txt"} <= names
    assert built["wheel"].name == f"dpfedexp-{dpfedexp.__version__}-py3-none-any.whl"
    assert "version" not in PROJECT["project"]


def test_no_package_for_development_is_needed_to_run():
    extras = PROJECT["project"]["optional-dependencies"]
    needed = {line.lower() for line in (*PROJECT["project"]["dependencies"], *extras["flower"], *extras["secure"])}
    assert needed.isdisjoint(line.lower() for line in extras["dev"])


BEGIN, END = "<!-- begin: versions -->", "<!-- end: versions -->"
NOT_TO_RUN = {"dev", "docs"}
"""Extras for working on the project."""


def table() -> str:
    """The table of versions in docs/compatibility.md, as the two files have it."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if "==" in line}
    rows = ["| | accepted | tests run with | needed for |", "|---|---|---|---|"]
    rows.append(f"| Python | {PROJECT['project']['requires-python']} | 3.11 | everything |")
    every = PROJECT["project"]["optional-dependencies"]
    extras = {name: lines for name, lines in every.items() if name not in NOT_TO_RUN}
    for purpose, needed in {"everything": PROJECT["project"]["dependencies"], **extras}.items():
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
