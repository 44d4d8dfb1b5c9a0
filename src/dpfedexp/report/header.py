"""What the top of a run's page says: algorithm, data, M, d and ε, whether it failed, and the command that made it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpfedexp.accounting import Ledger
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.runs.facts import RunFacts
from dpfedexp.runs.file_names import LEDGER, STATEMENT
from dpfedexp.runs.results import read_text


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


def read_header(folder: Path, statement: dict[str, Any] | None, last: dict[str, Any] | None) -> RunHeader:
    """The header of the run in a folder, from `run.json`, or from its statement or its ledger where it has none.

    Args:
        folder: the run's.
        statement: what `privacy.json` holds, None where there is none.
        last: the record of the last round, None before it.
    """
    epsilon = _epsilon(statement, last)
    facts = RunFacts.read(folder)
    if facts is not None:
        sizes = (facts.clients, facts.parameters, facts.rounds)
        return RunHeader(facts.algorithm, facts.data, *sizes, epsilon, facts.command, facts.stopped)
    ledger = _ledger_header(folder)
    named = statement or ledger
    algorithm = named.get("algorithm") if isinstance(named.get("algorithm"), str) else ""
    clients = named.get("clients") if isinstance(named.get("clients"), int) else None
    return RunHeader(str(algorithm or ""), clients=clients, epsilon=epsilon)


def read_statement(folder: Path) -> dict[str, Any] | None:
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


def _epsilon(statement: dict[str, Any] | None, last: dict[str, Any] | None) -> str:
    spent = (statement or last or {}).get("epsilon_total")
    if statement is None and last is None:
        return ""
    if not isinstance(spent, int | float):
        return "not private"
    delta = (statement or {}).get("delta")
    at = f" at δ = {delta:g}" if isinstance(delta, int | float) else ""
    if statement is None:
        return f"ε = {spent:.3f} so far"
    plan = statement.get("planned_rounds") if statement.get("stopping") else None
    notes = [
        *([f"of all {plan} planned rounds"] if isinstance(plan, int) else []),
        *(["the promise of a larger deployment, none to these clients"] if statement.get("noise_cohort") else []),
        *(["of the whole selection"] if statement.get("selection_runs") else []),
    ]
    return f"ε = {spent:.3f}{at}" + (f" ({'; '.join(notes)})" if notes else "")


def _ledger_header(folder: Path) -> dict[str, Any]:
    try:
        return Ledger.open(folder / LEDGER, read_only=True).header
    except LedgerError:
        return {}
