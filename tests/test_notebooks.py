"""The tutorials as they are stored: valid, without outputs, and nothing in them that a reader could not install."""

import ast
import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
STORED = sorted(TUTORIALS.glob("*.ipynb"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
JUPYTER = {"IPython"}
"""What every notebook server has."""

notebooks = pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def sources(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in read(path)["cells"] if cell["cell_type"] == kind]


def modules(requirements: list[str]) -> set[str]:
    """The modules of requirements, which are all named like their packages."""
    return {re.match(r"[\w-]+", text)[0].replace("-", "_").lower() for text in requirements}


@notebooks
def test_it_is_valid_and_holds_no_outputs(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}, "widgets' states are outputs too"
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    assert len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert {key for cell in notebook["cells"] for key in cell["metadata"]} <= {"tags"}
    if importlib.util.find_spec("nbformat"):
        import nbformat

        nbformat.validate(notebook)


@notebooks
def test_it_imports_what_its_first_cell_installs(path):
    installed = re.search(r'pip install "?\.(?:\[([\w,]+)\])?', sources(path, "markdown")[0])
    assert installed, "the first cell says what to install"
    extras = [name for name in (installed[1] or "").split(",") if name]
    named = PROJECT["dependencies"] + [text for name in extras for text in PROJECT["optional-dependencies"][name]]
    known = {"dpfedexp"} | modules(named) | JUPYTER | set(sys.stdlib_module_names)
    used = set()
    for node in ast.walk(ast.parse("\n".join(sources(path, "code")))):
        if isinstance(node, ast.Import):
            used |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            used.add((node.module or "").partition(".")[0])
    assert used <= known
