"""Every example runs, on a small size, and ends where it says."""

import importlib.util
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {"pfl_postprocessor": "pfl", "plain_flower": "flwr", "mlflow_tracking": "mlflow"}
"""What an example needs beside the package and its development tools."""
ENDS = {
    "own_optimiser": lambda losses: max(losses.values()) < 1.0,
    "pfl_postprocessor": lambda error: error < 0.3,
    "plain_flower": lambda distance: distance < 0.6,
    "sweep": lambda page: page.is_file(),
    "three_hospitals": lambda accuracy: accuracy > 0.6,
}


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_the_example_runs(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert ENDS[name](module.main(small=True))
