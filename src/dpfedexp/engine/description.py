"""What a run's files are told about the run, as plain values: they know nothing of who computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dpfedexp.algorithms.round import State
from dpfedexp.engine import outlets
from dpfedexp.engine.checkpoint_settings import NamedValues, settings_hash
from dpfedexp.engine.file_names import LEDGER
from dpfedexp.trainers.task import Clients


@dataclass(frozen=True)
class RunDescription:
    """What a run's files are told about the run.

    Attributes:
        name: the name that the ledger will know it by if it begins now.
        settings: everything that its result depends on (`runs.settings`).
        start: the state before the first round.
        clients: whose data they are; only a keyed hash of them is kept.
        algorithm: the algorithm's name.
        delta: the algorithm's δ.
        population: the public number of clients.
        rounds: how many rounds the run has.
        secure: whether it protects real data.
        chunk_size: clients per tensor program.
        trainer: how local updates are computed.
        noise_cohort: clients of a round of the larger deployment that is simulated; None where none is.
        stand_ins: how many simulated clients stand for them.
    """

    name: str
    settings: NamedValues
    start: State
    clients: Clients
    algorithm: str
    delta: float
    population: int
    rounds: int
    secure: bool
    chunk_size: int
    trainer: str
    noise_cohort: int | None = None
    stand_ins: float | None = None


def ledger_header(run: RunDescription) -> dict[str, Any]:
    """What a reader of the ledger alone needs for a statement."""
    header = {
        "config": settings_hash(run.settings),
        "algorithm": run.algorithm,
        "clients": run.population,
        "delta": run.delta,
        "simulated": not run.secure,
        "run": run.name,
        **({} if run.noise_cohort is None else {"noise_cohort": run.noise_cohort, "stand_ins": run.stand_ins}),
    }
    public = outlets.recorded(LEDGER, header, secure=run.secure)
    return {"config_hash": public.pop("config"), **public}
