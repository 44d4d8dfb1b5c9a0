"""The folder that `dpfedexp train` leaves, as a section; several of them, as a comparison."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
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
class RunHeader:
    """What is known of a run; None or empty where its folder does not say.

    Attributes:
        algorithm: its name.
        data: what the clients' data are.
        clients: M.
        parameters: d.
        rounds: how many were planned.
        epsilon: what the run promises, in words.
        command: what made it.
        stopped: why it ended early.
    """

    algorithm: str = ""
    data: str = ""
    clients: int | None = None
    parameters: int | None = None
    rounds: int | None = None
    epsilon: str = ""
    command: str = ""
    stopped: str = ""

    @property
    def text(self) -> str:
        """One line; what is not known is left out."""
        what = " on ".join(part for part in (self.algorithm, self.data) if part)
        sizes = [
            "" if self.clients is None else f"M = {self.clients:,} clients",
            "" if self.parameters is None else f"d = {self.parameters:,} parameters",
            self.epsilon,
        ]
        known = ", ".join(part for part in sizes if part)
        return f"{what}: {known}." if what and known else f"{what or known}." if what or known else ""


@dataclass(frozen=True)
class RunRecord:
    """What was read: `privacy` and `configuration` are empty where the run was interrupted before it wrote them."""

    name: str
    history: list[dict[str, Any]]
    privacy: str
    configuration: str
    epsilon_total: float | None
    advice: tuple[Advice, ...] = ()
    header: RunHeader = field(default_factory=RunHeader)

    @property
    def failure(self) -> str | None:
        """Why the run is of no use: its verdict, or a value that is no number any more."""
        lost = [
            name_of(key) for key in (*self.metrics, "eta_g") if self.history and self.history[-1].get(key, 0) is None
        ]
        return self.verdict or (f"{lost[0]} is not a finite number after the last round." if lost else None)

    @property
    def verdict(self) -> str | None:
        """Why it learnt nothing, or nothing shows that it did; None where there is no reason to say so."""
        return next((advice.sentence for advice in self.advice if advice.code == "dead"), None)

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
    header = _read_header(folder, statement, _promise(statement, history))
    return RunRecord(folder.resolve().name, history, privacy, configuration, epsilon, read_advice(folder), header)


def _read_header(folder: Path, statement: dict[str, Any] | None, epsilon: str) -> RunHeader:
    """From `run.json`, or from the statement or the ledger where there is none."""
    facts = RunFacts.read(folder)
    if facts is not None:
        sizes = (facts.clients, facts.parameters, facts.rounds)
        return RunHeader(facts.algorithm, facts.data, *sizes, epsilon, facts.command, facts.stopped)
    try:
        named = statement or Ledger.open(folder / LEDGER, read_only=True).header
    except LedgerError:
        named = {}
    algorithm, clients = named.get("algorithm"), named.get("clients")
    return RunHeader(
        algorithm if isinstance(algorithm, str) else "",
        clients=clients if isinstance(clients, int) else None,
        epsilon=epsilon,
    )


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
    planned = "" if run.header.rounds in (None, len(run.history)) else f" of {run.header.rounds} planned"
    notes = [] if run.privacy else ["This run wrote no privacy statement: it was interrupted, or it is still going on."]
    notes += [f"{advice.level.capitalize()}: {advice.sentence}" for advice in run.advice if advice.code != "dead"]
    return Section(
        name="run-" + "".join(c if c.isalnum() or c in "-_" else "-" for c in run.name),
        title=run.name,
        text=[
            *([f"Failed: {run.failure}"] if run.failure else []),
            *([f"Stopped early: {run.header.stopped}"] if run.header.stopped else []),
            f"{len(run.history)}{planned} rounds" + (f" in {sum(times):.1f} seconds." if times else "."),
        ],
        tables=[Table("After the last round", ["", "value"], rows)],
        charts=[Chart(chart, "Over rounds", "", panels)] if panels else [],
        notes=notes,
        command=run.header.command,
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
