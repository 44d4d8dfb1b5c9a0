"""Every test of a run has a folder of its own for what the run keeps private."""

import pytest


@pytest.fixture(autouse=True)
def private(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("private")
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(folder))
    return folder
