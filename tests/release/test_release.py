"""What a release and the check of an installed package refuse."""

import subprocess
import tarfile

import pytest

from tests.release import __main__ as release
from tests.release.__main__ import Refused, notes
from tests.release.flower import bounds
from tests.release.installed import FIXED, PROJECT, Failure, environment
from tests.sizes import long

TEXT = "# Changelog\n\n## Unreleased\n\n- New.\n\n## 0.2.0 (2026-12-01)\n- A step.\n\n## 0.1.0\n\nFirst.\n\n## 0.0.1 (2026-01-01)\n"


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "tiny"\nversion = "1.0"\n[tool.setuptools]\npy-modules = ["tiny"]\n'
    )
    (root / "tiny.py").write_text("one = 1\n")
    named = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["init", "-q"], ["add", "."], [*named, "commit", "-qm", "tiny"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    return root


@long
def test_two_builds_of_a_commit_are_the_same_and_hold_nothing_that_is_not_committed(repository, tmp_path):
    (repository / "tiny.py").write_text("two = 2\n")
    sdist, wheel = release.build_twice(repository, "HEAD", tmp_path)
    assert (sdist.name, wheel.name) == ("tiny-1.0.tar.gz", "tiny-1.0-py3-none-any.whl")
    with tarfile.open(sdist) as archive:
        assert archive.extractfile("tiny-1.0/tiny.py").read() == b"one = 1\n"
        assert {(file.uname, file.uid) for file in archive} == {("", 0)}


def test_uncommitted_changes_are_refused(repository):
    release.refuse_changes(repository, rehearsal=False)
    (repository / "tiny.py").write_text("two = 2\n")
    with pytest.raises(Refused, match=r"1 files .* such as tiny\.py; .*DRY=1"):
        release.refuse_changes(repository, rehearsal=False)


def test_builds_that_differ_are_no_release(tmp_path, monkeypatch):
    def other_bytes(root, commit, folder, variables):
        folder.mkdir()
        (folder / "tiny").write_text(variables["TZ"])
        return folder / "tiny", folder / "tiny"

    monkeypatch.setattr(release, "build", other_bytes)
    with pytest.raises(Failure, match="two builds of tiny"):
        release.build_twice(tmp_path, "HEAD", tmp_path)


@pytest.mark.parametrize("version", ["0.3.0", "0.1.0", "0.2", "0.0.1"])
def test_a_version_without_a_dated_section_with_text_is_refused_with_what_to_write(version):
    with pytest.raises(Refused, match=rf"'## {version} \(YYYY-MM-DD\)'.*DRY=1"):
        notes(version, TEXT, "0" * 40, rehearsal=False)
    assert "A rehearsal, not a release" in notes("0.3.0", TEXT, "0" * 40, rehearsal=True)
    released = notes("0.2.0", TEXT, "0123456789abcdef", rehearsal=False)
    assert "Released 2026-12-01, from commit 0123456789abcdef." in released
    assert "- A step." in released


def test_a_bill_has_the_wheel_as_its_subject_and_that_of_another_environment_is_refused(tmp_path):
    wheel = tmp_path / "dpfedexp-1.2.0-py3-none-any.whl"
    wheel.write_bytes(b"wheel")
    components = [{"name": name, "version": version} for name, version in FIXED.items()]
    bill = {"metadata": {"component": {"name": "dpfedexp"}}, "components": components}
    subject = release.completed(bill, wheel)["metadata"]["component"]
    assert (subject["version"], subject["purl"]) == ("1.2.0", "pkg:pypi/dpfedexp@1.2.0")
    assert subject["hashes"][0]["content"] == release.digest(wheel)
    with pytest.raises(Failure, match="says torch None, not"):
        release.completed(bill | {"components": components[1:]}, wheel)


def test_every_dependency_names_a_lowest_version():
    project = {"dependencies": ["torch>=2", "b-c>=0.6,<0.7"], "optional-dependencies": {"x": ["d[e]==1.4"]}}
    assert release.lowest_versions(project, ("x",)) == {"torch": "2", "b-c": "0.6", "d": "1.4"}
    assert release.lowest_versions(PROJECT, ("flower", "secure"))
    assert bounds("flwr[simulation]>=1.3,<2") == ["flwr==1.3", "flwr<2,>=1.3"]


def test_commands_do_not_see_the_source_tree(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "src")
    monkeypatch.setenv("DPFEDEXP_PRIVATE", "/elsewhere")
    assert "PYTHONPATH" not in environment(tmp_path)
    assert environment(tmp_path)["DPFEDEXP_PRIVATE"] == str(tmp_path / "private")
