"""Every example runs, on a small size, and ends where it says."""

import importlib.util
from pathlib import Path

import pytest

from tests.sizes import long

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {"pfl_postprocessor": "pfl", "plain_flower": "flwr", "mlflow_tracking": "mlflow", "tabular_pandas": "pandas"}
"""What an example needs beside the package and its development tools."""
SLOW = ("characters_by_author", "frozen_backbone", "sweep")
ENDS = {
    "characters_by_author": lambda accuracy: accuracy > 0.2,
    "frozen_backbone": lambda accuracy: accuracy > 0.4,
    "lora_language_model": lambda found: found[0] < 0.2 and 0.0 <= found[1] <= 1.0,
    "mlflow_tracking": lambda rounds: rounds == 4,
    "own_optimizer": lambda losses: max(losses.values()) < 1.0,
    "pfl_postprocessor": lambda error: error < 0.3,
    "plain_flower": lambda distance: distance < 0.6,
    "recommender": lambda r2: -0.5 < r2 < 1.0,
    "sweep": lambda page: page.is_file(),
    "tabular_pandas": lambda accuracy: accuracy > 0.55,
    "three_hospitals": lambda accuracy: accuracy > 0.6,
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(path.stem, marks=[long] if path.stem in SLOW else []) for path in sorted(EXAMPLES.glob("*.py"))],
)
def test_the_example_runs(name, tmp_path, monkeypatch):
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    monkeypatch.chdir(tmp_path)
    specification = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert ENDS[name](module.main(small=True))
