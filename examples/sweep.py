"""Which clip, which rate? A grid, one page, and what the looking costs.

python examples/sweep.py                      # writes sweep-example/report.html
"""

import subprocess
import sys
import tempfile
from pathlib import Path

FILE = """
[data]
kind = "synthetic"
clients = {clients}
dimension = 50

[algorithm]
name = "cdp_fedexp"
clip = 1.0
target_epsilon = 8.0

[local]
lr = 0.003
steps = 20

[run]
rounds = {rounds}
"""


def main(small: bool = False) -> Path:
    folder = Path(tempfile.mkdtemp() if small else "sweep-example")
    folder.mkdir(exist_ok=True)
    file = folder / "my.toml"
    file.write_text(FILE.format(clients=100 if small else 1000, rounds=2 if small else 30))
    grid = "0.3,1" if small else "0.1,0.3,1"
    command = [sys.executable, "-m", "dpfedexp", "sweep", str(file), "--grid", f"algorithm.clip={grid}"]
    subprocess.run([*command, "--seeds", "1" if small else "2", "--out", str(folder / "runs")], check=True)
    return folder / "runs" / "report.html"


if __name__ == "__main__":
    print(main(small="--small" in sys.argv))
