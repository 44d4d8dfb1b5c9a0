"""The Containerfile without a container: `python -m tests.release.container` follows its first stage, then runs its command.

COPY and RUN lines are followed in a temporary folder, under this machine's Python instead of the image's, with pip's index as it
is configured here instead of the one that is named. FROM, USER and useradd are not: they need a container.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.installed.check import SOURCE, Failure, require_files, step

FILE = SOURCE / "Containerfile"
SHORT = ["--seeds", "1"]


@dataclass(frozen=True)
class Instruction:
    """A line of a Containerfile: its keyword in capitals, and the rest."""

    keyword: str
    rest: str


def stages(text: str) -> list[list[Instruction]]:
    """The instructions of every stage, each beginning with its FROM."""
    lines = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    found: list[list[Instruction]] = []
    for line in lines:
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            found.append([])
        found[-1].append(Instruction(keyword, rest.strip()))
    return found


def only(stage: list[Instruction], keyword: str) -> list[str]:
    return [one.rest for one in stage if one.keyword == keyword]


def copy(rest: str, source: Path, target: Path) -> None:
    """What a COPY line copies: files into a folder, or a folder as another one."""
    *patterns, last = rest.split()
    for pattern in patterns:
        found = sorted(source.glob(pattern))
        if not found:
            raise Failure(f"COPY {rest}: there is no {pattern}")
        for path in found:
            if path.is_dir():
                shutil.copytree(path, target / last, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                (target / last).mkdir(parents=True, exist_ok=True)
                shutil.copy(path, target / last)


def follow(text: str, folder: Path) -> None:
    """Follows the COPY and RUN lines of the first stage and then the last stage's command, in the folder."""
    first, last = stages(text)
    source, prefix = folder / "source", folder / "opt"
    source.mkdir()
    (index,) = (rest.partition("=")[2] for rest in only(first, "ARG"))
    for one in first:
        if one.keyword == "COPY":
            copy(one.rest, SOURCE, source)
        elif one.keyword == "RUN":
            here = one.rest.replace("/opt/dpfedexp", str(prefix)).replace(' --extra-index-url "$TORCH_INDEX"', "")
            here = re.sub(r"^python\b", sys.executable, here)
            step(["bash", "-euc", here], source, f"RUN {one.rest.replace('$TORCH_INDEX', index)}")
    shutil.rmtree(source)
    source.mkdir()
    (command,) = (json.loads(rest) for rest in only(last, "CMD"))
    here = [word.replace("/opt/dpfedexp", str(prefix)).replace("/home/demo", str(folder)) for word in command]
    step([*here, *SHORT], source, " ".join(["CMD", *command, *SHORT]))
    require_files(folder / "demo", "report.html")


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="dpfedexp-container-") as name:
        try:
            follow(FILE.read_text(), Path(name).resolve())
        except Failure as failure:
            print(f"The Containerfile does not work: {failure}", file=sys.stderr)
            return 1
    print("The lines of the Containerfile do what they should; no container was made.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
