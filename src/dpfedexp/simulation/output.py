"""The folder that a run leaves: configuration, ledger, metrics, model and privacy statement."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from dpfedexp.errors import InputError
from dpfedexp.simulation.train import Run


def finite(value: Any) -> Any:
    """JSON has no infinity: a non-private ε becomes null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


class RunFolder:
    """Writes metrics as they come, and everything else at the end.

    config.toml        the resolved settings
    ledger.jsonl       what was charged, before each release
    metrics.jsonl/csv  one record per round
    model.safetensors  the trained parameters
    privacy.json/txt   the statement
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if any(self.path.iterdir()):
                raise InputError(f"the folder {str(self.path)!r} is not empty; name a new one with --out.")
            self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        except OSError as error:
            raise InputError(f"the folder {str(self.path)!r} can't be written: {error.strerror}.") from None

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    def write_config(self, toml: str) -> None:
        (self.path / "config.toml").write_text(toml, encoding="utf-8")

    def record(self, line: dict[str, Any]) -> None:
        self._metrics.write(json.dumps({key: finite(value) for key, value in line.items()}) + "\n")
        self._metrics.flush()

    def finish(self, run: Run) -> None:
        self._metrics.close()
        write_csv(self.path / "metrics.csv", run.history)
        tensors = {name: value.detach().contiguous() for name, value in run.model.state_dict().items()}
        save_file(tensors, self.path / "model.safetensors")
        (self.path / "privacy.json").write_text(run.privacy.to_json() + "\n", encoding="utf-8")
        (self.path / "privacy.txt").write_text(run.privacy.text + "\n", encoding="utf-8")


def write_csv(path: Path, records: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for record in records for key in record))
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(records)
