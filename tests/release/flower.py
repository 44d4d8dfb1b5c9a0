"""The tests of Flower with the lowest and the newest version that pyproject.toml admits: `make flower-versions`.

An environment beside this one takes everything from it but Flower, and what that version needs otherwise. `DPFEDEXP_SLOW` is not
set there: the tests that start processes need the versions that are named exactly.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from packaging.requirements import Requirement

from tests.release.installed import PROJECT, SOURCE


def bounds(requirement: str) -> list[str]:
    """What pip is asked for: the lowest version that a requirement such as "flwr>=1.38,<1.42" admits, and the newest."""
    wanted = Requirement(requirement)
    lowest = [one.version for one in wanted.specifier if one.operator in (">=", "==")]
    if not lowest:
        raise ValueError(f"{requirement!r} names no lowest version")
    return [f"{wanted.name}=={lowest[0]}", f"{wanted.name}{wanted.specifier}"]


def main() -> int:
    (requirement,) = PROJECT["optional-dependencies"]["flower"]
    failed = []
    for request in dict.fromkeys(bounds(requirement)):
        with tempfile.TemporaryDirectory(prefix="dpfedexp-flower-") as folder:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            python = f"{folder}/bin/python"
            (site,) = Path(folder).glob("lib/*/site-packages")
            (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
            pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade"]
            # Installed here even if the other environment has this version: with its programs.
            subprocess.run([*pip, "--ignore-installed", "--no-deps", request], check=True)
            subprocess.run([*pip, request], check=True)
            print(subprocess.check_output([python, "-m", "pip", "show", "flwr"], text=True).splitlines()[1], flush=True)
            known = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SOURCE / "src"), "DPFEDEXP_SLOW": "0"}
            done = subprocess.run([python, "-m", "pytest", "-n", "2", "tests/flower"], cwd=SOURCE, env=known)
            failed += [request] if done.returncode else []
    print(f"failed with {', '.join(failed)}" if failed else "the tests pass with the lowest and the newest Flower")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
