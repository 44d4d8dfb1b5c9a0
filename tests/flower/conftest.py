"""What tests of deployments share."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpfedexp.flower.store import Saving


@pytest.fixture
def alone() -> Iterator[None]:
    """One deployment at a time on this machine: Flower gives a process that is slow to start up, and starts another."""
    with (Path(tempfile.gettempdir()) / "dpfedexp-tests-deployment.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def at_once(monkeypatch):
    """A round's files are on disk before anybody looks at them, and not only before the next charge."""
    begin = Saving.begin

    def begin_and_wait(self, *args):
        begin(self, *args)
        self.wait()

    monkeypatch.setattr(Saving, "begin", begin_and_wait)
