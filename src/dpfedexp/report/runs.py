"""The folder that `dpfedexp train` leaves, as a section; several of them, as a comparison."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp.advice.message import Advice
from dpfedexp.errors import InputError
from dpfedexp.report.document import Chart, Panel, Section, Series, Table
from dpfedexp.runs.file_names import ADVICE, CONFIG, METRICS, STATEMENT, STATEMENT_TEXT

BOOKKEEPING = ("round", "eta_g", "clip", "update_norm", "vote_within_clip", "epsilon_total", "seconds")
NAMES = {
    "test_accuracy": "test accuracy",
    "test_loss": "test loss",
    "distance": "distance to the optimum",
    "eta_g": "global step size η_g",
    "clip": "clip C",
    "update_norm": "length of the released update ‖c̄‖",
    "epsilon_total": "ε so far",
    "seconds": "seconds per round",
}


@dataclass(frozen=True)
class RunRecord:
    """What was read: `privacy` and `configuration` are empty where the run was interrupted before it wrote them."""

    name: str
    history: list[dict[str, Any]]
    privacy: str
    configuration: str
    epsilon_total: float | None
    advice: tuple[Advice, ...] = ()

    @property
    def verdict(self) -> str | None:
        """Why it learnt nothing, or nothing shows that it did; None where there is no reason to say so."""
        return next((advice.sentence for advice in self.advice if advice.code == "dead"), None)

    @property
    def metrics(self) -> list[str]:
        return [key for key in dict.fromkeys(k for record in self.history for k in record) if key not in BOOKKEEPING]

    def series(self, key: str, name: str) -> Series:
        points = [(r["round"], r[key]) for r in self.history if isinstance(r.get(key), int | float)]
        return Series(name, [x for x, _ in points], [y for _, y in points])

    def last(self, key: str) -> str:
        values = [record[key] for record in self.history if isinstance(record.get(key), int | float)]
        return f"{values[-1]:.4g}" if values else "–"


def is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file()


def read_run(folder: Path) -> RunRecord:
    path = folder / METRICS
    history = []
    for number, text in enumerate(_text(path).splitlines(), 1):
        try:
            record = json.loads(text)
            record["round"] = int(record["round"])
            history.append(record)
        except (ValueError, KeyError, TypeError):
            # A run that was cut off may have left half a last line.
            if number < len(_text(path).splitlines()):
                raise InputError(f"the file {str(path)!r} has no round in line {number}: {text[:60]!r}.") from None
    epsilon = None
    if (folder / STATEMENT).is_file():
        try:
            epsilon = json.loads(_text(folder / STATEMENT)).get("epsilon_total")
        except (ValueError, AttributeError):
            raise InputError(f"the file {str(folder / STATEMENT)!r} is not a privacy statement.") from None
    privacy, configuration = (_text(folder / name, optional=True) for name in (STATEMENT_TEXT, CONFIG))
    return RunRecord(folder.resolve().name, history, privacy, configuration, epsilon, _advice(folder / ADVICE))


def _advice(path: Path) -> tuple[Advice, ...]:
    """What the run said about itself; nothing where an earlier version wrote the folder."""
    try:
        return tuple(Advice(**json.loads(line)) for line in _text(path, optional=True).splitlines())
    except (ValueError, TypeError):
        raise InputError(f"the file {str(path)!r} does not hold advice, one JSON object to a line.") from None


def run_section(run: RunRecord, chart: str = "run") -> Section:
    """One run: its metrics, step size, clip and ε over rounds, its privacy statement and its configuration."""
    keys = [*run.metrics, *(key for key in ("eta_g", "clip", "epsilon_total") if _varies(run, key))]
    panels = [Panel(_name(key), "round", _name(key), [run.series(key, _name(key))]) for key in keys]
    rows = [[_name(key), run.last(key)] for key in (*run.metrics, "eta_g", "clip", "epsilon_total")]
    times = [record["seconds"] for record in run.history if isinstance(record.get("seconds"), int | float)]
    notes = [] if run.privacy else ["This run wrote no privacy statement: it was interrupted, or it is still going on."]
    notes += [f"{advice.level.capitalize()}: {advice.sentence}" for advice in run.advice if advice.code != "dead"]
    return Section(
        name=_slug(run.name),
        title=run.name,
        text=[
            *([run.verdict] if run.verdict else []),
            f"{len(run.history)} rounds" + (f" in {sum(times):.1f} seconds." if times else "."),
        ],
        tables=[Table("After the last round", ["", "value"], rows)],
        charts=[Chart(chart, "Over rounds", "", panels)] if run.history else [],
        notes=notes,
        command=f"dpfedexp train {CONFIG}" if run.configuration else "",
        configuration={CONFIG: run.configuration} if run.configuration else {},
        privacy={"What this run promises": run.privacy} if run.privacy else {},
    )


def sweep_section(runs: Sequence[RunRecord]) -> Section:
    """Several runs side by side."""
    metrics = list(dict.fromkeys(key for run in runs for key in run.metrics))
    panels = [
        Panel(_name(key), "round", _name(key), [run.series(key, run.name) for run in runs])
        for key in (*metrics, "eta_g")
    ]
    rows = [
        [run.name, str(len(run.history)), *(run.last(key) for key in metrics), run.last("eta_g"), _epsilon(run)]
        for run in runs
    ]
    columns = ["run", "rounds", *(_name(key) for key in metrics), "η_g", "ε total"]
    return Section(
        name="comparison",
        title=f"{len(runs)} runs side by side",
        tables=[Table("After the last round", columns, rows)],
        charts=[Chart("comparison", "Over rounds", "", panels)],
    )


def _epsilon(run: RunRecord) -> str:
    return run.last("epsilon_total") if run.epsilon_total is None else f"{run.epsilon_total:.3f}"


def _varies(run: RunRecord, key: str) -> bool:
    values = [r[key] for r in run.history if isinstance(r.get(key), int | float) and math.isfinite(r[key])]
    return len(set(values)) > 1


def _name(key: str) -> str:
    if key.startswith("nonprivate_"):
        return f"{key.removeprefix('nonprivate_').replace('_', ' ')} (not private)"
    return NAMES.get(key, key.replace("_", " "))


def _slug(name: str) -> str:
    return "run-" + "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def _text(path: Path, optional: bool = False) -> str:
    if optional and not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error}.") from None
