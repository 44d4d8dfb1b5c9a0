"""How much of the package the tests ran, in a few lines: `make coverage`.

What runs in processes that tests start (the command line, killed runs, ranks, Flower) is not counted: figures are lower bounds.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

LOW = 80.0
"""Files of which the tests ran less than this, in percent, are named."""


def summary(report: dict) -> list[str]:
    """The lines to print for coverage.py's JSON report: every file below `LOW`, the worst first, then the total."""
    shares = {name: file["summary"]["percent_covered"] for name, file in report["files"].items()}
    low = sorted((share, name) for name, share in shares.items() if share < LOW)
    lines = [f"{share:5.1f}%  {name}" for share, name in low]
    total = report["totals"]
    counts = f"{total['covered_lines']} of {total['num_statements']} statements in {len(shares)} files"
    return [*lines, f"{total['percent_covered']:5.1f}%  in all: {counts}; {len(low)} below {LOW:.0f}%"]


def main() -> int:
    import coverage

    measured = coverage.Coverage()
    measured.load()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        try:
            measured.json_report(outfile=str(path))
        except coverage.exceptions.NoDataError:
            print("no coverage was measured; `make coverage` measures it", file=sys.stderr)
            return 2
        report = json.loads(path.read_text())
    print("Coverage")
    print("\n".join(summary(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
