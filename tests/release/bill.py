"""A software bill of materials in CycloneDX: everything that an environment holds in which the wheel was installed and run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.installed.check import CONSTRAINTS, PROJECT, require, step, version_of
from tests.release.build import digest

TOOL = "cyclonedx-bom"
VALIDATE = (
    "import sys; from cyclonedx.schema import SchemaVersion; from cyclonedx.validation.json import JsonStrictValidator; "
    "error = JsonStrictValidator(SchemaVersion.V1_6).validate_str(open(sys.argv[1]).read()); sys.exit(error and str(error))"
)


def completed(bill: dict, wheel: Path) -> dict:
    """The bill with the package itself as its subject: its version, which pyproject.toml leaves open, and the wheel's hash.

    Raises:
        Failure: the bill lacks something that the package needs.
    """
    named = {component["name"].lower(): component for component in bill.get("components", [])}
    for line in CONSTRAINTS.read_text().splitlines():
        name, _, version = line.partition("==")
        if name in ("torch", "numpy", "scipy", "dp-accounting", "flwr"):
            stated = named.get(name, {}).get("version", "nothing")
            require(stated.partition("+")[0] == version, f"the bill of materials says {name} {stated}, not {version}")
    subject = bill["metadata"]["component"]
    require(
        subject["name"] == PROJECT["name"],
        f"the bill of materials is one of {subject['name']}, not of {PROJECT['name']}",
    )
    version = version_of(wheel)
    about = {
        "version": version,
        "purl": f"pkg:pypi/{PROJECT['name']}@{version}",
        "hashes": [{"alg": "SHA-256", "content": digest(wheel)}],
    }
    return bill | {"metadata": bill["metadata"] | {"component": subject | about}}


def write_bill(programs: Path, wheel: Path, root: Path, folder: Path, epoch: int, out: Path) -> int:
    """Writes the bill of an environment and validates it strictly against the schema; returns how many components it has.

    Args:
        programs: the environment's folder of programs.
        wheel: what was installed there.
        root: the repository, for pyproject.toml.
        folder: for the tool's own environment, which is made.
        epoch: the date of the bill, in seconds since 1970.
        out: the file.
    """
    request = next(line for line in CONSTRAINTS.read_text().splitlines() if line.startswith(f"{TOOL}=="))
    step([sys.executable, "-m", "venv", str(folder / "venv")], folder, "an environment for the bill of materials")
    python = str(folder / "venv" / "bin" / "python")
    step([python, "-m", "pip", "install", "--quiet", request], folder, f"pip install {request}")
    raw = folder / "raw.json"
    words = [
        "environment",
        "--pyproject",
        str(root / "pyproject.toml"),
        "--mc-type",
        "library",
        "--sv",
        "1.6",
        "--no-validate",
    ]
    tool = ["env", f"SOURCE_DATE_EPOCH={epoch}", str(folder / "venv" / "bin" / "cyclonedx-py")]
    reproducible = ["--output-reproducible", "-o", str(raw), str(programs / "python")]
    step([*tool, *words, *reproducible], folder, "cyclonedx-py environment")
    bill = completed(json.loads(raw.read_text()), wheel)
    out.write_text(json.dumps(bill, indent=2, ensure_ascii=False) + "\n")
    step([python, "-c", VALIDATE, str(out)], folder, "the bill of materials against the schema of CycloneDX 1.6")
    return len(bill["components"])
