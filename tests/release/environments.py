"""In which environments a release is checked: as tested, the oldest and the newest that it claims to run in.

torch for Linux on x86-64 comes with gigabytes of accelerator packages, unless the index has a build whose version ends with
"+cpu". What can't be had without them is said to be unchecked, and is checked when it is asked for.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.installed.check import PROJECT, Environment, tested_torch

Versions = Callable[[str], list[Version]]
"""The versions of torch that pip can have for a Python such as "3.11"."""


def floor(specifier: str) -> str:
    """The lowest version that a specifier such as ">=2.5,<3" or "==1.4" admits."""
    lowest = re.search(r"[>=]=\s*([0-9.]+)", specifier)
    if lowest is None:
        raise ValueError(f"the specifier {specifier!r} names no lowest version")
    return lowest[1]


def lowest_versions(project: dict, extras: Iterable[str]) -> list[str]:
    """Lines of a constraints file that hold all dependencies but torch at the lowest version that the project admits."""
    lines = [*project["dependencies"], *(line for name in extras for line in project["optional-dependencies"][name])]
    wanted = [Requirement(line) for line in lines]
    return [f"{one.name}=={floor(str(one.specifier))}" for one in wanted if one.name != "torch"]


def interpreters(lowest: str) -> dict[str, str]:
    """Every Python from the lowest on that is on the path or in pyenv: its version such as "3.11", and its program."""
    first = int(lowest.split(".")[1])
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    found = {f"{sys.version_info[0]}.{sys.version_info[1]}": sys.executable}
    for minor in range(first, first + 10):
        name = f"python3.{minor}"
        places = [*sorted(map(str, pyenv.glob(f"3.{minor}.*/bin/{name}"))), shutil.which(name)]
        for program in filter(None, places):
            trial = subprocess.run([program, "-c", "import venv, ssl"], capture_output=True)
            if trial.returncode == 0:
                found.setdefault(name.removeprefix("python"), program)
    return found


def offered(python: str) -> list[Version]:
    """Asks pip which versions of torch there are for a Python."""
    pip = [sys.executable, "-m", "pip", "index", "versions", "torch", "--only-binary=:all:"]
    printed = subprocess.run([*pip, "--python-version", python], capture_output=True, text=True).stdout
    line = re.search(r"^Available versions: (.*)$", printed, re.MULTILINE)
    return sorted(Version(text) for text in line[1].split(", ")) if line else []


def is_small(version: Version) -> bool:
    """Whether a build of torch comes without accelerator packages."""
    return (version.local or "").startswith("cpu") or (platform.system(), platform.machine()) != ("Linux", "x86_64")


def plan(
    pythons: dict[str, str], versions: Versions, lowest: Path, small: Callable[[Version], bool] = is_small
) -> tuple[list[Environment], list[str]]:
    """The environments to check the wheel in besides the one that the tests run in, and a sentence for each that can't be had.

    Args:
        pythons: interpreters, from `interpreters`.
        versions: `offered`.
        lowest: the constraints file of `lowest_versions`, without the extra `flower`, whose one version asks for newer packages.
        small: which builds of torch may be installed.
    """
    floor_python = floor(PROJECT["requires-python"])
    floor_torch = Version(floor(next(line for line in PROJECT["dependencies"] if line.startswith("torch"))))
    tested = Version(tested_torch().removeprefix("torch=="))
    newest_python = max(pythons, key=Version)
    environments, unchecked = [], []

    def wanted(python: str, choose: Callable[[Iterable[Version]], Version]) -> str | None:
        """What to ask pip for; None, and a sentence, where it would be too much."""
        there = [version for version in versions(python) if Version(version.public) >= floor_torch]
        if python not in pythons or not there:
            unchecked.append(f"Python {python}: " + ("no torch for it" if python in pythons else "no such interpreter"))
            return None
        best = choose(Version(version.public) for version in there)
        if any(small(version) for version in there if version.public == best.public):
            return f"torch=={best}"
        unchecked.append(f"torch {best} on Python {python}: pip offers it only with accelerator packages")
        return None

    oldest = wanted(floor_python, min)
    if floor_python in pythons:
        title = "the oldest of all" if oldest else f"the oldest of all but torch, which is {tested}"
        torch = oldest or f"torch=={tested}"
        environments.append(Environment(title, pythons[floor_python], torch, lowest, ("secure",), short=True))
    newest = wanted(newest_python, max)
    if newest_python == floor_python:
        unchecked.append(f"a Python after {floor_python}: no such interpreter")
    if newest is None:
        if floor_python in pythons:
            title = f"the newest of all but Python and torch, which is {tested}"
            environments.append(Environment(title, pythons[floor_python], f"torch=={tested}", None, short=True))
        if newest_python != floor_python:
            title = "the newest of all without torch: only what starts without it"
            environments.append(Environment(title, pythons[newest_python], None, None, ()))
    else:
        environments.append(Environment("the newest of all", pythons[newest_python], newest, None, short=True))
    return environments, unchecked
