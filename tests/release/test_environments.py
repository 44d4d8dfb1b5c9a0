"""Oldest and newest: what is planned on machines that have everything, something or little."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.version import Version

from tests.installed import check
from tests.installed.check import PROJECT
from tests.release.environments import floor, lowest_versions, plan

LOWEST = Path("lowest.txt")
OLDEST = floor(next(line for line in PROJECT["dependencies"] if line.startswith("torch")))
PYTHON = floor(PROJECT["requires-python"])
BOTH = {PYTHON: "/old/python", "3.99": "/new/python"}


def offers(*texts: str):
    return lambda python: sorted(map(Version, texts))


def is_cpu(version: Version) -> bool:
    return version.local == "cpu"


def test_a_machine_with_everything_checks_oldest_and_newest_and_leaves_nothing_out():
    versions = offers("1.0+cpu", f"{OLDEST}.0", f"{OLDEST}.0+cpu", "99.0", "99.0+cpu")
    (oldest, newest), unchecked = plan(BOTH, versions, LOWEST, is_cpu)
    assert (oldest.python, oldest.torch, oldest.constraints) == ("/old/python", f"torch=={OLDEST}.0", LOWEST)
    assert (newest.python, newest.torch, newest.constraints) == ("/new/python", "torch==99.0", None)
    assert unchecked == []


def test_torches_that_bring_gigabytes_along_are_named_and_not_installed():
    environments, unchecked = plan(BOTH, offers(f"{OLDEST}.0", "99.0"), LOWEST, is_cpu)
    assert {one.torch for one in environments} == {check.tested_torch(), None}
    assert [sentence.partition(":")[0] for sentence in unchecked] == [
        f"torch {OLDEST}.0 on Python {PYTHON}",
        "torch 99.0 on Python 3.99",
    ]
    (bare,) = (one for one in environments if one.torch is None)
    assert (bare.python, bare.extras) == ("/new/python", ())


def test_everything_may_be_asked_for():
    environments, unchecked = plan(BOTH, offers(f"{OLDEST}.0", "99.0"), LOWEST, lambda version: True)
    assert [one.torch for one in environments] == [f"torch=={OLDEST}.0", "torch==99.0"]
    assert unchecked == []


def test_a_python_that_is_not_there_is_named():
    environments, unchecked = plan({"3.99": "/new/python"}, offers("99.0+cpu"), LOWEST, is_cpu)
    assert [one.python for one in environments] == ["/new/python"]
    assert unchecked == [f"Python {PYTHON}: no such interpreter"]


def test_a_machine_with_the_oldest_python_alone_says_so():
    environments, unchecked = plan({PYTHON: "/old/python"}, offers(f"{OLDEST}.0+cpu"), LOWEST, is_cpu)
    assert {one.python for one in environments} == {"/old/python"}
    assert unchecked == [f"a Python after {PYTHON}: no such interpreter"]


def test_an_index_without_torch_is_not_a_pass():
    _, unchecked = plan(BOTH, offers(), LOWEST, is_cpu)
    assert len(unchecked) == 2


def test_the_lowest_versions_are_those_of_the_project():
    project = {"dependencies": ["torch>=2", "a>=1.26", "b-c>=0.6,<0.7"], "optional-dependencies": {"x": ["d[e]==1.4"]}}
    assert lowest_versions(project, ["x"]) == ["a==1.26", "b-c==0.6", "d==1.4"]


def test_every_dependency_names_a_lowest_version():
    assert lowest_versions(PROJECT, ["flower", "secure"])
    with pytest.raises(ValueError, match="no lowest version"):
        floor("<3")
