"""A source distribution has the same bytes whatever files it was packed from had for times, owners and permissions."""

from __future__ import annotations

import io
import subprocess
import tarfile

import pytest

from tests.release.__main__ import checked_page, refuse_changes
from tests.release.build import build_twice, committed_files, digest, pack_again
from tests.release.changelog import Refused

EPOCH = 1_700_000_000


def packed(path, mtime: int, owner: str, mode: int, names: list[str]):
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uname, member.uid, member.mode = 4, mtime, owner, mtime % 7, mode
            archive.addfile(member, io.BytesIO(b"text"))
    return path


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "repository"
    root.mkdir()
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "tiny"\nversion = "1.0"\n[tool.setuptools]\npy-modules = ["tiny"]\n'
    )
    (root / "tiny.py").write_text("one = 1\n")
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for words in (["git", "init", "-q"], ["git", "add", "."], [*git, "commit", "-qm", "tiny"]):
        subprocess.run(words, cwd=root, check=True)
    return root


def test_two_packings_of_the_same_files_become_one(tmp_path):
    one = packed(tmp_path / "one.tar.gz", 1, "somebody", 0o664, ["p/b", "p/a"])
    other = packed(tmp_path / "other.tar.gz", 2, "else", 0o644, ["p/a", "p/b"])
    assert digest(one) != digest(other)
    for path in (one, other):
        pack_again(path, EPOCH)
    assert digest(one) == digest(other)
    with tarfile.open(one) as archive:
        assert [(file.name, file.mtime, file.mode, file.uname) for file in archive] == [
            ("p/a", EPOCH, 0o644, ""),
            ("p/b", EPOCH, 0o644, ""),
        ]
        assert archive.extractfile("p/a").read() == b"text"


def test_programs_stay_programs(tmp_path):
    path = packed(tmp_path / "one.tar.gz", 1, "", 0o775, ["p/program"])
    pack_again(path, EPOCH)
    with tarfile.open(path) as archive:
        assert archive.getmember("p/program").mode == 0o755


def test_two_builds_of_a_commit_are_the_same_and_hold_nothing_that_is_not_committed(repository, tmp_path):
    (repository / "tiny.py").write_text("two = 2\n")
    sdist, wheel = build_twice(repository, "HEAD", tmp_path)
    assert (sdist.name, wheel.name) == ("tiny-1.0.tar.gz", "tiny-1.0-py3-none-any.whl")
    with tarfile.open(sdist) as archive:
        assert archive.extractfile("tiny-1.0/tiny.py").read() == b"one = 1\n"


def test_builds_that_differ_are_no_release(repository, tmp_path, monkeypatch):
    def other_bytes(tree, epoch, folder, variables):
        folder.mkdir()
        (folder / "tiny-1.0.tar.gz").write_text(variables["TZ"])
        return folder / "tiny-1.0.tar.gz", folder / "tiny-1.0.tar.gz"

    monkeypatch.setattr("tests.release.build.build", other_bytes)
    with pytest.raises(RuntimeError, match=r"two builds of tiny-1\.0\.tar\.gz"):
        build_twice(repository, "HEAD", tmp_path)


def test_uncommitted_changes_are_refused_and_a_rehearsal_says_that_they_are_left_out(repository, capsys):
    refuse_changes(repository, rehearsal=False)
    (repository / "tiny.py").write_text("two = 2\n")
    (repository / "new.py").write_text("")
    with pytest.raises(Refused, match=r"2 files .* such as tiny\.py; .*DRY=1"):
        refuse_changes(repository, rehearsal=False)
    refuse_changes(repository, rehearsal=True)
    assert "are not in it" in capsys.readouterr().out


def test_the_files_of_a_commit_are_those_of_git(repository, tmp_path):
    (repository / "new.py").write_text("")
    committed_files(repository, "HEAD", tmp_path / "files")
    assert {path.name for path in (tmp_path / "files").iterdir()} == {"pyproject.toml", "tiny.py"}


def test_the_page_of_checks_keeps_what_passed_apart_from_what_was_not_checked():
    page = checked_page("1.0", ["the wheel on Python 3.11"], ["torch 2.5"])
    passed, _, unchecked = page.partition("## Not checked here")
    assert "Python 3.11" in passed
    assert "torch 2.5" not in passed
    assert "torch 2.5" in unchecked
    assert "Not checked" not in checked_page("1.0", ["all"], [])
