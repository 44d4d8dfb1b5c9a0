"""What tests of real deployments share."""

from __future__ import annotations

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def alone() -> Iterator[None]:
    """One deployment at a time on this machine: Flower gives a process that is slow to start up, and starts another."""
    with (Path(tempfile.gettempdir()) / "dpfedexp-tests-deployment.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
