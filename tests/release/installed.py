"""Install a wheel or a source distribution in a clean environment, away from the source tree, and use it.

Commands run in a temporary folder, without PYTHONPATH: a file that only the source tree has is missing. The first step that does
not do what it should raises `Failure` with its output. `python -m tests.release.installed dist/dpfedexp-….whl`.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).resolve().parents[2]
CONSTRAINTS = SOURCE / "constraints.txt"
PROJECT = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]
FIXED = dict(line.split("==") for line in CONSTRAINTS.read_text().splitlines() if "==" in line)
DEVELOPMENT = ("pytest", "hypothesis", "mypy", "ruff", "coverage", "opacus", "selenium", "build")
"""Packages of the `dev` extra that nothing else asks for; none may be needed to run."""
PLACE = (
    "import dpfedexp, importlib.metadata, importlib.util, json; "
    "print(json.dumps([dpfedexp.__file__, dpfedexp.__version__, importlib.metadata.version('dpfedexp'), "
    f"[name for name in {DEVELOPMENT!r} if importlib.util.find_spec(name)]]))"
)
FILES = {
    "demo": ("report.html",),
    "x": ("pyproject.toml", "README.md", *(f"federation/{name}.py" for name in ("server_app", "client_app", "task"))),
    "first": ("config.toml", "metrics.jsonl", "ledger.jsonl", "privacy.json", "privacy.txt", "report.html"),
}
"""What the commands below have to write, by folder."""


class Failure(Exception):
    """A step did not do what it should."""


def environment(folder: Path) -> dict[str, str]:
    """The caller's variables without those that lead Python to other code, and with a private folder of this check."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "DPFEDEXP_PRIVATE")
    others = {name: value for name, value in os.environ.items() if name not in dropped}
    return others | {"DPFEDEXP_PRIVATE": str(folder / "private")}


def step(words: list[str], folder: Path, title: str = "", **variables: str) -> str:
    """Runs a command in the folder, prints how long it took, and returns what it printed; `Failure` if it fails."""
    start, known = time.monotonic(), environment(folder.parent) | variables
    done = subprocess.run(words, cwd=folder, env=known, capture_output=True, text=True)
    print(f"{time.monotonic() - start:7.1f} s:  {title or ' '.join(words)}", flush=True)
    if done.returncode != 0:
        raise Failure(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def require(condition: bool, sentence: str) -> None:
    if not condition:
        raise Failure(sentence)


@dataclass(frozen=True)
class Environment:
    """What a clean environment is made of.

    Attributes:
        title: what it stands for.
        torch: the version that pip is asked for first and exactly.
        constraints: a file of versions for everything else; None: the newest that pip finds.
        extras: of the package.
        short: leaves out the demo and the report, most of the time that a check takes.
    """

    title: str
    torch: str = FIXED["torch"]
    constraints: Path | None = CONSTRAINTS
    extras: tuple[str, ...] = ("flower", "secure")
    short: bool = False


def version_of(artifact: Path) -> str:
    """The version in a file name: of `dpfedexp-1.2.3-py3-none-any.whl` and `dpfedexp-1.2.3.tar.gz` 1.2.3."""
    return artifact.name.removesuffix(".tar.gz").split("-")[1]


def use(run: Callable[..., str], work: Path, where: Environment) -> None:
    """The commands of a reader of the README, and what they have to print or write."""
    require("fit" in run("--help"), "dpfedexp --help does not name its commands")
    printed = run("privacy", "epsilon", "--noise-multiplier", "5", "--rounds", "50", "--delta", "1e-5")
    require("15.4562" in printed, f"the exact ε of 50 rounds at noise multiplier 5, 15.4562, is missing:\n{printed}")
    # Own data: 400 clients of five rows, whose label is the sign of the first column.
    rows = np.random.default_rng(0).standard_normal((2500, 4)).astype(np.float32)
    labels, test = (rows[:, 0] > 0).astype(np.int64), {"test_inputs": rows[2000:], "test_targets": rows[2000:, 0] > 0}
    test["test_targets"] = test["test_targets"].astype(np.int64)
    np.savez(work / "own.npz", inputs=rows[:2000], targets=labels[:2000], client=np.repeat(np.arange(400), 5), **test)
    run("fit", "own.npz", "--epsilon", "8", "--rounds", "10", "--out", "fitted", "--quiet")
    run("privacy", "verify", "fitted")
    last = json.loads((work / "fitted" / "metrics.jsonl").read_text().splitlines()[-1])
    require(last["test_accuracy"] > 0.9, f"fit learned too little from data that are easy to learn: {last}")
    if "flower" in where.extras:
        run("flower", "new", "x")
        require('name = "x"' in (work / "x" / "pyproject.toml").read_text(), "the Flower app does not bear its name")
    if not where.short:
        require("DP-FedEXP" in run("demo", "--seeds", "1"), "the demo printed no table")
        run("init", "my.toml")
        run("train", "my.toml", "--set", "run.rounds=3", "--set", "data.clients=50", "--out", "first", "--quiet")
        run("privacy", "verify", "first")
        run("report", "first")
    for path in (work / folder / name for folder, names in FILES.items() if (work / folder).exists() for name in names):
        require(path.is_file() and path.stat().st_size > 0, f"{path} was not written or is empty")


def check(artifact: Path, where: Environment, after: Callable[[Path], None] = lambda programs: None) -> None:
    """Installs a wheel or a source distribution in a new environment, uses it, and calls `after` with the folder of programs."""
    with tempfile.TemporaryDirectory(prefix="dpfedexp-installed-") as name:
        root = Path(name).resolve()
        work, programs = root / "work", root / "venv" / "bin"
        work.mkdir()
        step([sys.executable, "-m", "venv", str(root / "venv")], work, "a new environment")
        # Modules are compiled when first imported: compiling all of torch and ray takes longer than everything that is run here.
        options = "-m pip --disable-pip-version-check install --quiet --no-compile"
        pip = [str(programs / "python"), *options.split()]
        versions = [] if where.constraints is None else ["-c", str(where.constraints)]
        step([*pip, f"torch=={where.torch}"], work, f"pip install torch=={where.torch}")
        request = f"{artifact}[{','.join(where.extras)}]"
        step([*pip, *versions, request], work, f"pip install {Path(request).name}")
        step([str(programs / "python"), "-m", "pip", "check"], work, "pip check")
        place, stated, recorded, extra = json.loads(
            step([str(programs / "python"), "-c", PLACE], work, "import dpfedexp")
        )
        require(Path(place).is_relative_to(root), f"dpfedexp was imported from {place}, not from what was installed")
        require(stated == recorded == version_of(artifact), f"the versions {stated} and {recorded} are not the file's")
        require(not extra, f"installing it brought packages for development along: {', '.join(extra)}")
        use(
            lambda *words: step([str(programs / "dpfedexp"), *words], work, " ".join(("dpfedexp", *words))), work, where
        )
        after(programs)


def main(artifact: Path) -> int:
    if not artifact.is_file():
        print(f"artifact is {str(artifact)!r}, which does not exist; `make wheel` builds it", file=sys.stderr)
        return 2
    try:
        check(artifact.resolve(), Environment("as tested"))
    except Failure as failure:
        print(f"{artifact.name} does not run: {failure}", file=sys.stderr)
        return 1
    print(f"{artifact.name} runs in a clean environment")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
