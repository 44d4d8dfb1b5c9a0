import threading

import pytest

from dpfedexp.cli import train, trials

FILE = """
[data]
kind = "synthetic"
clients = 20
dimension = 4
[algorithm]
name = "dp_fedavg"
clip = 1.0
target_epsilon = 8.0
[local]
lr = 0.1
steps = 2
[run]
rounds = 2
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def in_process(monkeypatch):
    """The runs of a sweep one after the other in this process, which does not import torch for each."""
    one_at_a_time = threading.Lock()

    def made(plan, trial, threads):
        settings = plan.settings(trial)
        folder = train.run_folder(settings, plan.folder(trial), "")
        with one_at_a_time:
            try:
                train.execute(settings, folder, progress=False)
            except MemoryError as error:
                return str(error)
        return ""

    monkeypatch.setattr(trials, "_train", made)


@pytest.fixture
def undrawn(monkeypatch):
    """Figures are empty files: tests/report and the demo's test draw them."""
    monkeypatch.setattr("dpfedexp.engine.plot.save_figure", lambda figure, path: path.touch())
