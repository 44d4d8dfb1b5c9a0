"""What made a run is asked for where it runs, and is null where nobody can know it."""

from __future__ import annotations

import subprocess

import pytest

import dpfedexp
from reproduction.paper.results import record as provenance


@pytest.fixture(autouse=True)
def fresh():
    provenance.commit.cache_clear()
    yield
    provenance.commit.cache_clear()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository whose source is what is imported."""
    package = tmp_path / "src" / "dpfedexp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    monkeypatch.setattr(dpfedexp, "__file__", str(package / "__init__.py"))

    def git(*arguments):
        named = ("-c", "user.name=n", "-c", "user.email=e@example.com")
        return subprocess.run(["git", *named, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "one")
    return tmp_path, git("rev-parse", "HEAD").stdout.strip()


def test_the_commit_of_clean_source(repository):
    folder, head = repository
    (folder / "results.json").write_text("results are no source")
    assert provenance.commit() == (head, False)


def test_changed_source_is_dirty(repository):
    folder, head = repository
    (folder / "src" / "dpfedexp" / "new.py").write_text("")
    assert provenance.commit() == (head, True)


def test_an_installed_package_has_no_commit_even_inside_a_repository(repository, monkeypatch):
    folder, _ = repository
    package = folder / "lib" / "site-packages" / "dpfedexp"
    package.mkdir(parents=True)
    monkeypatch.setattr(dpfedexp, "__file__", str(package / "__init__.py"))
    assert provenance.commit() == (None, None)


def test_versions_and_device_are_named():
    here = provenance.here("cpu")
    assert set(here) == {"commit", "dirty", "versions", "device", "recorded_in"}
    assert {"dpfedexp", "torch", "numpy", "python"} <= set(here["versions"])
    assert here["device"].startswith("cpu (")
