"""Install a wheel or a source distribution in a clean environment, in the versions of constraints.txt, and use it."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.installed.check import Environment, Failure, check, computed, tested_torch


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.installed", description=__doc__)
    parser.add_argument("artefact", type=Path, help="the wheel or source distribution to install")
    artefact = parser.parse_args().artefact.resolve()
    if not artefact.is_file():
        print(f"artefact is {str(artefact)!r}, which does not exist; `make wheel` builds it", file=sys.stderr)
        return 2
    start = time.monotonic()
    try:
        check(artefact, Environment("as tested", torch=tested_torch()))
    except Failure as failure:
        print(f"{artefact.name} does not run: {failure}", file=sys.stderr)
        return 1
    seconds = f"{time.monotonic() - start:7.1f} s, {computed():6.1f} s computing"
    print(f"{seconds}:  {artefact.name} runs in a clean environment")
    return 0


if __name__ == "__main__":
    sys.exit(main())
