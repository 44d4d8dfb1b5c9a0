"""What tests share: the real MNIST files and a browser, where the machine has them, and a private folder that is not the user's."""

import os
from pathlib import Path

import pytest

from dpfedexp.data.data_sets import find_mnist
from dpfedexp.errors import InputError
from tests.browser import started


@pytest.fixture(scope="session", autouse=True)
def private_root(tmp_path_factory) -> Path:
    """Where runs keep what is private; processes that tests start inherit it."""
    os.environ["DPFEDEXP_PRIVATE"] = str(tmp_path_factory.mktemp("private"))
    return Path(os.environ["DPFEDEXP_PRIVATE"])


@pytest.fixture(scope="session")
def mnist_folder() -> Path:
    """The folder with MNIST's four files; DPFEDEXP_REQUIRE_DATA=1 turns their absence from a skip into a failure."""
    reason = "real MNIST is not here; set DPFEDEXP_DATA to a folder that holds its four files, or holds them in mnist/"
    try:
        folder = find_mnist(None)
    except InputError as error:
        folder, reason = None, f"{reason} ({error})"
    if folder is None and os.environ.get("DPFEDEXP_REQUIRE_DATA") == "1":
        pytest.fail(reason)
    if folder is None:
        pytest.skip(reason)
    return folder


@pytest.fixture
def untried(monkeypatch):
    """Secure runs take their trainer without trying whether it keeps clients apart: tests/trainers and tests/audit do."""
    monkeypatch.setattr("dpfedexp.trainers.select.passes_isolation", lambda *rest: True)


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, started once."""
    chromium = started(tmp_path_factory.mktemp("profile"))
    yield chromium
    chromium.quit()
