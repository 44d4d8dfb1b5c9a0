"""What tests of deployments share."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpfedexp.flower import client

from .loopback import Silence


@pytest.fixture(autouse=True)
def _unsynced(monkeypatch):
    """Files are written and not synced: no test here takes the machine's power away, and syncing is most of their time."""
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@pytest.fixture
def silent(monkeypatch):
    """Clients draw no noise."""
    monkeypatch.setattr(client, "ChaChaNoise", Silence)


@pytest.fixture
def sleepless(monkeypatch):
    monkeypatch.setattr("time.sleep", lambda seconds: None)


@pytest.fixture
def alone() -> Iterator[None]:
    """One deployment at a time on this machine: Flower gives a process that is slow to start up, and starts another."""
    with (Path(tempfile.gettempdir()) / "dpfedexp-tests-deployment.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@pytest.fixture
def public_place() -> Iterator[Path]:
    """A folder that other users can enter, with one in it, `shared`, that they can write to."""
    place = Path(tempfile.mkdtemp(prefix="dpfedexp-test-"))
    place.chmod(0o755)
    (place / "shared").mkdir()
    (place / "shared").chmod(0o777)
    yield place
    shutil.rmtree(place)
