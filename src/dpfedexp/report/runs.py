"""The folder that `dpfedexp train` leaves, as a section; several of them, as a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp.accounting import Ledger
from dpfedexp.engine.outlets import CHECKPOINT, CONFIG, LEDGER, METRICS, STATEMENT, STATEMENT_TEXT
from dpfedexp.engine.plan import Advice
from dpfedexp.engine.plot import STEERING, Chart, Panel, metrics_in, name_of, over_rounds, run_panels
from dpfedexp.engine.run import RunFacts, read_advice, read_history, read_text
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.report.document import Section, Table


@dataclass(frozen=True)
class RunRecord:
    """What was read, and empty or None where the folder does not say.

    `what` ran on what data, with how many clients and parameters (`sizes`), and what it promises, in words; `rounds` were planned;
    `stopped` is why the run ended early.
    """

    name: str
    history: list[dict[str, Any]]
    privacy: str
    configuration: str
    epsilon_total: float | None
    advice: tuple[Advice, ...] = ()
    what: str = ""
    sizes: str = ""
    promise: str = ""
    rounds: int | None = None
    command: str = ""
    stopped: str = ""

    def title(self, promise: bool = True) -> str:
        """One line; what is not known is left out."""
        known = ", ".join(part for part in (self.sizes, self.promise if promise else "") if part)
        said = ": ".join(part for part in (self.what, known) if part)
        return f"{said}." if said else ""

    @property
    def failure(self) -> str | None:
        """Why the run is of no use: it learnt nothing, or a value is no number any more."""
        dead = [advice.sentence for advice in self.advice if advice.code == "dead"]
        last = self.history[-1] if self.history else {}
        lost = [name_of(key) for key in (*self.metrics, "eta_g") if last.get(key, 0) is None]
        reasons = [*dead, *(f"{name} is not a finite number after the last round." for name in lost)]
        return reasons[0] if reasons else None

    @property
    def metrics(self) -> list[str]:
        return metrics_in(self.history)

    def last(self, key: str) -> str:
        values = [record[key] for record in self.history if key in record]
        if values and not isinstance(values[-1], int | float):
            return "infinite" if key == "epsilon_total" else "not finite"
        return f"{values[-1]:z.4g}" if values else "–"


def is_run(folder: Path) -> bool:
    """Whether a run wrote the folder; one that was started with `checkpoint` alone has its rounds in the checkpoint."""
    return (folder / METRICS).is_file() or (folder / CHECKPOINT).is_file()


def read_run(folder: Path) -> RunRecord:
    """What the folder of a run says, of one that was cut off too."""
    history, statement = read_history(folder), _read_statement(folder)
    epsilon = None if statement is None else statement.get("epsilon_total")
    privacy, configuration = (read_text(folder / name, optional=True) for name in (STATEMENT_TEXT, CONFIG))
    read = (folder.resolve().name, history, privacy, configuration, epsilon, read_advice(folder))
    promise, facts = _promise(statement, history), RunFacts.read(folder)
    if facts is not None:
        what = " on ".join(part for part in (facts.algorithm, facts.data) if part)
        sizes = f"M = {facts.clients:,} clients, d = {facts.parameters:,} parameters"
        return RunRecord(*read, what, sizes, promise, facts.rounds, facts.command, facts.stopped)
    try:
        named = statement or Ledger.open(folder / LEDGER, read_only=True).header
    except LedgerError:
        named = {}
    algorithm, clients = named.get("algorithm"), named.get("clients")
    sizes = f"M = {clients:,} clients" if isinstance(clients, int) else ""
    return RunRecord(*read, algorithm if isinstance(algorithm, str) else "", sizes, promise)


def _read_statement(folder: Path) -> dict[str, Any] | None:
    path = folder / STATEMENT
    if not path.is_file():
        return None
    try:
        content = json.loads(read_text(path))
        if isinstance(content, dict):
            return content
    except (ValueError, RecursionError):
        pass
    raise InputError(f"the file {str(path)!r} is not a privacy statement.")


def _promise(statement: dict[str, Any] | None, history: list[dict[str, Any]]) -> str:
    if statement is None and not history:
        return ""
    spent = (statement or history[-1]).get("epsilon_total")
    if not isinstance(spent, int | float):
        return "not private"
    if statement is None:
        return f"ε = {spent:.3f} so far"
    delta, plan = statement.get("delta"), statement.get("planned_rounds") if statement.get("stopping") else None
    at = f" at δ = {delta:g}" if isinstance(delta, int | float) else ""
    notes = [
        *([f"of all {plan} planned rounds"] if isinstance(plan, int) else []),
        *(["the promise of a larger deployment, none to these clients"] if statement.get("noise_cohort") else []),
        *(["of the whole selection"] if statement.get("selection_runs") else []),
    ]
    return f"ε = {spent:.3f}{at}" + (f" ({'; '.join(notes)})" if notes else "")


def run_section(run: RunRecord, chart: str = "run") -> Section:
    """One run: its metrics, step size, clip and ε over rounds, its privacy statement and its configuration."""
    varying = [key for key in (*STEERING, "epsilon_total") if len(set(over_rounds(run.history, key, "").y)) > 1]
    panels = run_panels(run.history, [*run.metrics, *varying])
    rows = [[name_of(key), run.last(key)] for key in (*run.metrics, *STEERING, "epsilon_total") if run.last(key) != "–"]
    times = [record["seconds"] for record in run.history if isinstance(record.get("seconds"), int | float)]
    planned = "" if run.rounds in (None, len(run.history)) else f" of {run.rounds} planned"
    notes = [] if run.privacy else ["This run wrote no privacy statement: it was interrupted, or it is still going on."]
    notes += [f"{advice.level.capitalize()}: {advice.sentence}" for advice in run.advice if advice.code != "dead"]
    return Section(
        name="run-" + "".join(c if c.isalnum() or c in "-_" else "-" for c in run.name),
        title=run.name,
        text=[
            *([f"Failed: {run.failure}"] if run.failure else []),
            *([f"Stopped early: {run.stopped}"] if run.stopped else []),
            f"{len(run.history)}{planned} rounds" + (f" in {sum(times):.1f} seconds." if times else "."),
        ],
        tables=[Table("After the last round", ["", "value"], rows)],
        charts=[Chart(chart, "Over rounds", "", panels)] if panels else [],
        notes=notes,
        command=run.command,
        configuration={CONFIG: run.configuration} if run.configuration else {},
        privacy={"What this run promises": run.privacy} if run.privacy else {},
    )


def runs_section(runs: Sequence[RunRecord]) -> Section:
    """Several runs side by side."""
    metrics = list(dict.fromkeys(key for run in runs for key in run.metrics))
    panels = [
        Panel(name_of(key), "round", name_of(key), [over_rounds(run.history, key, run.name) for run in runs])
        for key in (*metrics, "eta_g")
    ]
    rows = [
        [
            f"{run.name} (failed)" if run.failure else run.name,
            str(len(run.history)),
            *(run.last(key) for key in metrics),
            run.last("eta_g"),
            run.last("epsilon_total") if run.epsilon_total is None else f"{run.epsilon_total:.3f}",
        ]
        for run in runs
    ]
    columns = ["run", "rounds", *(name_of(key) for key in metrics), "η_g", "ε total"]
    return Section(
        name="comparison",
        title=f"{len(runs)} runs side by side",
        tables=[Table("After the last round", columns, rows)],
        charts=[Chart("comparison", "Over rounds", "", panels)],
    )
