"""The Containerfile: what it copies exists, nothing runs as root, and its command is one of ours."""

from __future__ import annotations

import json

import pytest
from typer.main import get_command

from dpfedexp.cli import app
from tests.installed.check import PROJECT, SOURCE, Failure
from tests.release.container import FILE, copy, only, stages
from tests.release.environments import floor

BUILD, FINAL = stages(FILE.read_text())


def test_both_stages_have_the_oldest_python():
    images = [only(stage, "FROM")[0].split()[0] for stage in (BUILD, FINAL)]
    assert images == [f"docker.io/library/python:{floor(PROJECT['requires-python'])}-slim"] * 2


def test_the_command_is_the_demo():
    (command,) = map(json.loads, only(FINAL, "CMD"))
    assert command[:2] == ["/opt/dpfedexp/bin/dpfedexp", "demo"]
    get_command(app).commands["demo"].make_context("demo", command[2:])


def test_the_demo_does_not_run_as_root_nor_writes_outside_its_home():
    (user,), (home,) = only(FINAL, "USER"), only(FINAL, "WORKDIR")
    assert f"--uid {user} " in only(FINAL, "RUN")[0]
    assert int(user) >= 1000
    assert only(FINAL, "CMD")[0].count(home) == 1
    keywords = [one.keyword for one in FINAL]
    assert "RUN" not in keywords[keywords.index("USER") :]


def test_torch_comes_first_and_for_the_cpu():
    installed = [line for line in only(BUILD, "RUN") if "pip install" in line]
    assert "\"$(grep '^torch==' constraints.txt)+cpu\"" in installed[0]
    assert installed[1].endswith("-c constraints.txt .")
    assert all("--no-cache-dir" in line for line in installed)


def test_what_is_copied_is_enough_to_build_and_no_more(tmp_path):
    for rest in only(BUILD, "COPY"):
        copy(rest, SOURCE, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {
        "pyproject.toml", "README.md", "LICENSE", "constraints.txt", "src",
    }  # fmt: skip
    assert (tmp_path / "src" / "dpfedexp" / "cli" / "__init__.py").is_file()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(Failure, match="there is no missing"):
        copy("missing.txt ./", tmp_path, tmp_path / "target")
