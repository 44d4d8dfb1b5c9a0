import pytest


@pytest.fixture
def same_streams(monkeypatch):
    """A secure run draws its streams anew; with this two runs can be compared bit for bit."""
    monkeypatch.setattr("dpfedexp.engine.prepare.secrets.randbits", lambda bits: 12345)
