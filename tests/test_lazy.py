"""Packages that load their public names when they are first used."""

import ast
import importlib
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import dpfedexp

PACKAGES = ["dpfedexp", *(f"dpfedexp.{room}" for room in ("audit", "config", "data", "flower", "mechanisms"))]
HEAVY = {"torch", "numpy", "scipy", "pydantic", "matplotlib", "dp_accounting", "typer", "rich", "flwr", "safetensors"}


def for_type_checkers(package) -> list[str]:
    """The names that are imported under `if TYPE_CHECKING:`, as a type checker reads them."""
    tree = ast.parse(Path(package.__file__).read_text(encoding="utf-8"))
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    aliases = [alias for node in imports for alias in node.names]
    assert all(alias.asname == alias.name for alias in aliases), "`X as X` is what re-exports a name"
    return [alias.name for alias in aliases]


@pytest.mark.parametrize("name", PACKAGES)
def test_every_public_name_is_listed_for_type_checkers_loads_and_is_not_that_of_a_module_beside_it(name):
    """Importing the module, for any other name in it, would put it in the name's place."""
    package = importlib.import_module(name)
    folder = Path(package.__file__).parent
    assert [key for key in package.__all__ if (folder / f"{key}.py").exists() or (folder / key).is_dir()] == []
    assert sorted(for_type_checkers(package)) == [public for public in package.__all__ if public != "__version__"]
    if name == "dpfedexp.flower":
        pytest.importorskip("flwr")
    listed = dir(package)
    for public in package.__all__:
        assert getattr(package, public) is not None
        assert public in listed
    assert package.__all__ == sorted(package.__all__)


def loaded_by(code):
    """The packages that a new process has loaded after this code."""
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}


def test_importing_every_package_imports_nothing_that_is_slow():
    assert HEAVY & loaded_by(f"import {', '.join(PACKAGES)}") == set()


@pytest.mark.parametrize(
    ("package", "typed", "meant"),
    [("dpfedexp", "cdp_fedex", "cdp_fedexp"), ("dpfedexp", "sgd", "Sgd"), ("dpfedexp.data", "read_idz", "read_idx")],
)
def test_a_misspelt_name_is_answered_with_the_nearest_right_one_once(package, typed, meant):
    sentence = f"module '{package}' has no attribute '{typed}'. Did you mean '{meant}'?"
    with pytest.raises(AttributeError, match=re.escape(sentence)) as caught:
        getattr(importlib.import_module(package), typed)
    # As Python prints it, which suggests names of its own where the error has an object.
    assert "".join(traceback.format_exception(caught.value)).count("Did you mean") == 1


def test_a_name_like_no_other_is_answered_with_all_and_names_that_python_asks_for_are_absent():
    with pytest.raises(AttributeError, match=r"Known: AdamW, AdaptiveClip, Algorithm, .*train\."):
        dpfedexp.zzzzzz  # noqa: B018
    assert not hasattr(dpfedexp, "__wrapped__")
    assert not hasattr(dpfedexp, "_repr_html_")


def test_an_error_inside_a_module_is_not_taken_for_a_missing_name(tmp_path, monkeypatch):
    package = tmp_path / "lazy_example"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\nfrom dpfedexp.lazy import lazy_names\nif TYPE_CHECKING:\n"
        "    from lazy_example.broken import thing as thing\n__getattr__, __dir__, __all__ = lazy_names(__name__)\n"
    )
    (package / "broken.py").write_text("import a_package_that_does_not_exist\n")
    monkeypatch.syspath_prepend(tmp_path)
    example = importlib.import_module("lazy_example")
    for asked in ("thing", "broken"):
        with pytest.raises(ModuleNotFoundError, match="No module named 'a_package_that_does_not_exist'"):
            getattr(example, asked)


def test_a_run_from_python_imports_no_package_of_the_command_line():
    code = (
        "import torch, dpfedexp\n"
        "data = dpfedexp.Federation.iid(torch.ones(20, 3), torch.arange(20) % 2, clients=10)\n"
        "dpfedexp.fit(torch.nn.Linear(3, 2), data, epsilon=8, rounds=1)"
    )
    assert {"typer", "rich", "pydantic", "jinja2", "matplotlib", "tomli_w"} & loaded_by(code) == set()
