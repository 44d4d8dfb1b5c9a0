"""Install a wheel in a clean environment, away from the source tree, and use it.

The environment is new and holds nothing but the wheel, its extras `flower` and `secure`, and what they ask for, in the versions of
constraints.txt. Commands run in a temporary folder, without PYTHONPATH: a file that only the source tree has is missing. Each step
prints how long it took. The first one that does not do what it should ends the check with exit code 1 and its output.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
SOURCE = CONSTRAINTS.parent
DEVELOPMENT = ("pytest", "hypothesis", "mypy", "ruff", "coverage", "opacus", "selenium", "build")
"""Packages of the `dev` extra that nothing else asks for; none may be needed to run."""


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


def install(wheel: Path, root: Path, work: Path) -> Path:
    """A new environment in `root` with the wheel in it; returns its folder of programs."""
    step([sys.executable, "-m", "venv", str(root / "venv")], work, "a new environment")
    programs = root / "venv" / "bin"
    # Modules are compiled when first imported: compiling all of torch and ray takes longer than everything that is run here.
    pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    torch = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith("torch=="))
    step([*pip, torch], work, f"pip install {torch}")
    request = f"{wheel}[flower,secure]"
    step([*pip, "-c", str(CONSTRAINTS), request], work, f"pip install {wheel.name}[flower,secure]")
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
    require(Path(place).is_relative_to(programs.parent), f"dpfedexp was imported from {place}, not from the wheel")
    require(not Path(place).is_relative_to(SOURCE), f"dpfedexp was imported from the source tree, {place}")
    require(stated == recorded, f"dpfedexp.__version__ is {stated}, but the wheel's version is {recorded}")
    require(not development, f"installing the wheel brought packages for development along: {', '.join(development)}")
    step([python, "-m", "pip", "check"], work, "pip check")


def check_demo(run: Callable[..., str], work: Path) -> None:
    printed = run("demo", "--seeds", "1")
    require("DP-FedEXP" in printed, f"the demo printed no table:\n{printed}")
    require_files(work / "demo", "report.html")


def check_table1(run: Callable[..., str], work: Path) -> None:
    printed = run("paper", "table1")
    require("15.258" in printed, f"Table 1's printed ε of central DP is missing:\n{printed}")
    require_files(work / "paper-results", "table1.json", "report.html")


def check_explorer(run: Callable[..., str], work: Path) -> None:
    run("explore")
    require_files(work, "explorer.html")


def check_flower(run: Callable[..., str], work: Path) -> None:
    run("flower", "new", "x")
    require_files(work / "x", "pyproject.toml", "README.md")
    for name in ("server_app.py", "client_app.py", "task.py"):
        require(len(list((work / "x").rglob(name))) == 1, f"the Flower app has no {name}")
    require(
        'name = "x"' in (work / "x" / "pyproject.toml").read_text(),
        "the Flower app does not bear the name it was given",
    )


def check_run_and_report(run: Callable[..., str], work: Path) -> None:
    run("init", "my.toml")
    run("train", "my.toml", "--set", "run.rounds=3", "--set", "data.clients=50", "--out", "first", "--quiet")
    require_files(work / "first", "config.toml", "metrics.jsonl", "ledger.jsonl", "privacy.json", "privacy.txt")
    run("privacy", "verify", "first")
    run("report", "first")
    require_files(work / "first", "report.html")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.installed", description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path, help="the wheel to install")
    wheel = parser.parse_args().wheel.resolve()
    if not wheel.is_file():
        print(f"wheel is {str(wheel)!r}, which does not exist; `make wheel` builds it", file=sys.stderr)
        return 2
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dpfedexp-installed-") as name:
        root = Path(name).resolve()
        work = root / "work"
        work.mkdir()
        try:
            programs = install(wheel, root, work)
            check_place(programs, work)

            def run(*words: str) -> str:
                return step([str(programs / "dpfedexp"), *words], work, " ".join(("dpfedexp", *words)))

            for check in (check_demo, check_table1, check_explorer, check_flower, check_run_and_report):
                check(run, work)
        except Failure as failure:
            print(f"The wheel does not run: {failure}", file=sys.stderr)
            return 1
    print(
        f"{time.monotonic() - start:7.1f} s, {computed():6.1f} s computing:  {wheel.name} runs in a clean environment"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
