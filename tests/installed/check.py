"""Install a wheel or a source distribution in a clean environment, away from the source tree, and use it.

The environment is new and holds nothing but the package, the extras that were asked for, and what they need. Commands run in a
temporary folder, without PYTHONPATH: a file that only the source tree has is missing. Each step prints how long it took. The first
one that does not do what it should raises `Failure` with its output.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
SOURCE = CONSTRAINTS.parent
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
DEPENDENCIES = [line for line in PROJECT["dependencies"] if not line.startswith("torch")]
DEVELOPMENT = ("pytest", "hypothesis", "mypy", "ruff", "coverage", "opacus", "selenium", "build")
"""Packages of the `dev` extra that nothing else asks for; none may be needed to run."""
Run = Callable[..., str]
"""Runs `dpfedexp` with the given words and returns what it printed."""


class Failure(Exception):
    """A step did not do what it should."""


def environment(folder: Path) -> dict[str, str]:
    """The caller's variables without those that lead Python to other code, and with a private folder of this check.

    pip's own variables stay: they say where packages come from, not which.
    """
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "DPFEDEXP_PRIVATE")
    others = {name: value for name, value in os.environ.items() if name not in dropped}
    return others | {"DPFEDEXP_PRIVATE": str(folder / "private")}


def computed() -> float:
    """CPU seconds of all processes that this one started and that have ended: a figure that a busy machine hardly changes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def step(words: list[str], folder: Path, title: str) -> str:
    """Run a command in the folder and print how long it took, and how long its processes computed.

    Returns:
        What it printed.

    Raises:
        Failure: its exit code was not 0.
    """
    start, before = time.monotonic(), computed()
    done = subprocess.run(words, cwd=folder, env=environment(folder.parent), capture_output=True, text=True)
    seconds = f"{time.monotonic() - start:7.1f} s, {computed() - before:6.1f} s computing"
    print(f"{seconds}:  {title}", flush=True)
    if done.returncode != 0:
        raise Failure(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Failure(sentence)


def require_files(folder: Path, *names: str) -> None:
    """Every named file exists and is not empty."""
    for name in names:
        path = folder / name
        require(path.is_file(), f"{path} was not written")
        require(path.stat().st_size > 0, f"{path} is empty")


@dataclass(frozen=True)
class Environment:
    """What a clean environment is made of.

    Attributes:
        title: what it stands for.
        python: the interpreter.
        torch: what pip is asked for first and exactly, such as "torch==2.13.0"; None: none, and only what starts without it is run.
        constraints: a file of versions for everything else; None: the newest that pip finds.
        extras: of the package.
        short: leaves out the demo and the report, most of the time that a check takes.
    """

    title: str
    python: str = sys.executable
    torch: str | None = None
    constraints: Path | None = CONSTRAINTS
    extras: tuple[str, ...] = ("flower", "secure")
    short: bool = False


def tested_torch() -> str:
    """The line of constraints.txt that says which torch the tests run with."""
    return next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))


def version_of(artefact: Path) -> str:
    """The version in a file name: of `dpfedexp-1.2.3-py3-none-any.whl` and `dpfedexp-1.2.3.tar.gz` 1.2.3."""
    return artefact.name.removesuffix(".tar.gz").split("-")[1]


def install(artefact: Path, where: Environment, root: Path, work: Path) -> Path:
    """A new environment in `root` with the wheel or source distribution in it; returns its folder of programs."""
    step([where.python, "-m", "venv", str(root / "venv")], work, "a new environment")
    programs = root / "venv" / "bin"
    # Modules are compiled when first imported: compiling all of torch and ray takes longer than everything that is run here.
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    versions = [] if where.constraints is None else ["-c", str(where.constraints)]
    request = f"{artefact.name}[{','.join(where.extras)}]" if where.extras else artefact.name
    if where.torch is None:
        step([*pip, *versions, *DEPENDENCIES], work, "pip install its dependencies but torch")
        step([*pip, "--no-deps", str(artefact)], work, f"pip install --no-deps {artefact.name}")
    else:
        step([*pip, where.torch], work, f"pip install {where.torch}")
        step([*pip, *versions, str(artefact.parent / request)], work, f"pip install {request}")
    return programs


def check_place(programs: Path, work: Path) -> None:
    """What is imported is what was installed: not the source tree, no development package, nothing missing or in conflict."""
    python = str(programs / "python")
    code = (
        "import dpfedexp, importlib.metadata, importlib.util, json; "
        "print(json.dumps([dpfedexp.__file__, dpfedexp.__version__, importlib.metadata.version('dpfedexp'), "
        f"[name for name in {DEVELOPMENT!r} if importlib.util.find_spec(name)]]))"
    )
    place, stated, recorded, development = json.loads(step([python, "-c", code], work, "import dpfedexp"))
    require(
        Path(place).is_relative_to(programs.parent), f"dpfedexp was imported from {place}, not from what was installed"
    )
    require(not Path(place).is_relative_to(SOURCE), f"dpfedexp was imported from the source tree, {place}")
    require(stated == recorded, f"dpfedexp.__version__ is {stated}, but the version that was installed is {recorded}")
    require(not development, f"installing it brought packages for development along: {', '.join(development)}")


def check_start(run: Run, work: Path) -> None:
    """What starts without torch."""
    require("fit" in run("--help"), "dpfedexp --help does not name its commands")
    printed = run("privacy", "epsilon", "--noise-multiplier", "5", "--rounds", "50", "--delta", "1e-5")
    require("15.4562" in printed, f"the exact ε of 50 rounds at noise multiplier 5, 15.4562, is missing:\n{printed}")


def check_fit(run: Run, work: Path) -> None:
    """Own data: 400 clients of five rows, whose label is the sign of the first column."""
    rows = np.random.default_rng(0).standard_normal((2500, 4)).astype(np.float32)
    labels = (rows[:, 0] > 0).astype(np.int64)
    np.savez(
        work / "own.npz",
        inputs=rows[:2000],
        targets=labels[:2000],
        client=np.repeat(np.arange(400), 5),
        test_inputs=rows[2000:],
        test_targets=labels[2000:],
    )
    run("fit", "own.npz", "--epsilon", "8", "--rounds", "10", "--out", "fitted", "--quiet")
    run("privacy", "verify", "fitted")
    last = json.loads((work / "fitted" / "metrics.jsonl").read_text().splitlines()[-1])
    require(last["test_accuracy"] > 0.9, f"fit learnt too little from data that are easy to learn: {last}")


def check_demo(run: Run, work: Path) -> None:
    printed = run("demo", "--seeds", "1")
    require("DP-FedEXP" in printed, f"the demo printed no table:\n{printed}")
    require_files(work / "demo", "report.html")


def check_flower(run: Run, work: Path) -> None:
    run("flower", "new", "x")
    require_files(work / "x", "pyproject.toml", "README.md")
    for name in ("server_app.py", "client_app.py", "task.py"):
        require(len(list((work / "x").rglob(name))) == 1, f"the Flower app has no {name}")
    require(
        'name = "x"' in (work / "x" / "pyproject.toml").read_text(),
        "the Flower app does not bear the name it was given",
    )


def check_run_and_report(run: Run, work: Path) -> None:
    run("init", "my.toml")
    run("train", "my.toml", "--set", "run.rounds=3", "--set", "data.clients=50", "--out", "first", "--quiet")
    require_files(work / "first", "config.toml", "metrics.jsonl", "ledger.jsonl", "privacy.json", "privacy.txt")
    run("privacy", "verify", "first")
    run("report", "first")
    require_files(work / "first", "report.html")


def check(artefact: Path, where: Environment, after: Callable[[Path], None] = lambda programs: None) -> None:
    """Install the file in a new environment and use it.

    Args:
        artefact: a wheel or a source distribution.
        where: what the environment is made of.
        after: called with the environment's folder of programs, once everything has run and before it is deleted.

    Raises:
        Failure: a step did not do what it should.
    """
    with tempfile.TemporaryDirectory(prefix="dpfedexp-installed-") as name:
        root = Path(name).resolve()
        work = root / "work"
        work.mkdir()
        programs = install(artefact, where, root, work)

        def run(*words: str) -> str:
            return step([str(programs / "dpfedexp"), *words], work, " ".join(("dpfedexp", *words)))

        version = run("--version").strip()
        require(version == version_of(artefact), f"dpfedexp --version printed {version!r}, not that of {artefact.name}")
        check_place(programs, work)
        check_start(run, work)
        if where.torch is not None:
            step([str(programs / "python"), "-m", "pip", "check"], work, "pip check")
            for use in (
                check_fit,
                *(() if where.short else (check_demo, check_run_and_report)),
            ):
                use(run, work)
        else:
            package = str(next(programs.parent.glob("lib/*/site-packages/dpfedexp")))
            step(
                [str(programs / "python"), "-W", "error", "-m", "compileall", "-q", package],
                work,
                "compile every module",
            )
        if "flower" in where.extras:
            check_flower(run, work)
        after(programs)
