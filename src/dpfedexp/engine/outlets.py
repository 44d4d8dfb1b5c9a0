"""Everything that leaves a run: every file and every field that it writes or prints, and by what right each is public.

released      computed from what the mechanism released, and from nothing else of the clients'
public        given to the run by whoever started it, and the same whatever the clients hold
server        measured by the server on data of its own
accounting    what was charged, and names drawn at random
nonprivate    depends on the clients' data without noise: durations, sizes that a device chose, diagnostics

A run that protects real data (`secure`) writes nothing of the last kind. What is not in this list is not written: `recorded`
refuses it, and a test compares the files of whole runs with it. A run's private folder (`runs/private/`) is not an outlet; it
stays with whoever holds the data. The files of a secure run get one date when it ends, because the time between them is a duration.
Times of day and durations are in no outlet of a secure run: `CLOCKS` names every module that reads a clock, and why nothing of it
leaves such a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

from dpfedexp.engine.file_names import (
    ADVICE,
    CHECKPOINT,
    CONFIG,
    ERROR,
    FACTS,
    LEDGER,
    LEDGER_HEAD,
    METRICS,
    METRICS_TABLE,
    MODEL,
    REPORT,
    SERVER_CHECKPOINT,
    SERVER_TENSORS,
    STATEMENT,
    STATEMENT_TEXT,
    STATUS,
)

Right = Literal["released", "public", "server", "accounting", "nonprivate"]
Fields = Mapping[str, Right]

ROUND: Fields = {
    "round": "public",
    "eta_g": "released",
    "clip": "released",
    "vote_*": "released",
    # A local rate that sets itself follows from votes.
    "local_rate": "released",
    # ‖c̄‖ of the round's released mean.
    "update_norm": "released",
    "epsilon_total": "accounting",
    "seconds": "nonprivate",
    "nonprivate_*": "nonprivate",
    # Whatever else a record holds came from `test` or `evaluate`.
    "*": "server",
}
DEPLOYED_ROUND: Fields = {
    "round": "public",
    "eta_g": "released",
    "clip": "released",
    "update_norm": "released",
    "vote_*": "released",
    "epsilon_round": "accounting",
    "epsilon_total": "accounting",
    "delta": "public",
    # How many nodes were asked and answered, where the mechanism's promise does not rest on hiding it.
    "asked": "public",
    "valid": "public",
    "refused": "public",
    "missing": "public",
}
"""The record of a round of a deployment: its server has no field of its own invention in it."""
OUTLETS: Mapping[str, Fields] = {
    LEDGER: {
        "format": "public",
        "version": "public",
        "config": "public",
        "algorithm": "public",
        "clients": "public",
        "delta": "public",
        "simulated": "public",
        "noise_cohort": "public",
        "stand_ins": "public",
        "selection_runs": "public",
        "selection_mu": "public",
        "run": "accounting",
        "seq": "accounting",
        "round": "public",
        "noise": "accounting",
        # What the mechanism is; under an adaptive clip its radius, which was released the round before.
        "event": "released",
        "previous": "accounting",
        "hash": "accounting",
    },
    LEDGER_HEAD: {"count": "accounting", "hash": "accounting"},
    CHECKPOINT: {
        "format": "public",
        "version": "public",
        "w": "released",
        "recent.*": "released",
        "server.*": "released",
        "memory.*": "released",
        "control": "released",
        "tensors": "released",
        "round": "public",
        "radius": "released",
        "settings": "public",
        "run": "accounting",
        "ledger": "accounting",
        # The records of the rounds, each by the rights of `ROUND`.
        "history": "released",
        "controls": "public",
        "chunk_size": "nonprivate",
        "trainer": "nonprivate",
    },
    METRICS: ROUND,
    METRICS_TABLE: ROUND,
    CONFIG: {"*": "public"},
    # How updates were computed depends on sizes; why a run stopped, on what it released and what the server measured.
    FACTS: {"trainer": "nonprivate", "stopped": "released", "run": "accounting", "*": "public"},
    MODEL: {"*": "released"},
    STATEMENT: {"*": "accounting"},
    STATEMENT_TEXT: {"*": "accounting"},
    # Made from public numbers, records of rounds and norms of the released model.
    ADVICE: {"level": "released", "code": "released", "sentence": "released"},
    # A traceback may hold anything.
    ERROR: {"text": "nonprivate"},
    # Of a sweep or a selection, made from the files of its runs.
    "sweep.json": {"*": "released"},
    "selection.json": {"*": "public"},
    "selection.txt": {"*": "released"},
    # Drawn from the files above, by `dpfedexp report`.
    REPORT: {"*": "released"},
    "*.svg": {"*": "released"},
    "*.png": {"*": "released"},
    "*.pdf": {"*": "released"},
    SERVER_CHECKPOINT: {
        "format": "public",
        "version": "public",
        "run": "accounting",
        "ledger": "accounting",
        "nodes": "public",
        "round": "public",
        "radius": "released",
        "tensors": "public",
        # A hash of released tensors.
        "blake2b": "released",
        "earlier": "released",
        "config": "public",
        # The records of the rounds, each by the rights of `DEPLOYED_ROUND`.
        "history": "released",
    },
    SERVER_TENSORS: {"*": "released"},
    STATUS: {
        "status": "public",
        "round": "public",
        "rounds": "public",
        "epsilon": "accounting",
        "delta": "public",
        # What the server's error says.
        "reason": "released",
    },
    "deployed round": DEPLOYED_ROUND,
    "terminal": {"elapsed": "nonprivate", **ROUND},
    "tensorboard": ROUND,
    "mlflow": ROUND,
    "wandb": ROUND,
    "log": {"*": "nonprivate"},
}
CLOCKS: Mapping[str, str] = {
    "audit.*": "audits measure mechanisms on synthetic clients",
    "cli.train": "the default name of a folder has the time at which the run was started",
    "cli.fit": "the default name of a folder has the time at which the run was started",
    "flower.link.*": "waits for processes and connections",
    "flower.local.*": "waits for processes of a federation on this machine",
    "flower.node.*": "waits for the app and for requests",
    "flower.server.nodes": "waits for nodes and replies; what the server's own log says of it has Flower's time of day",
    "flower.server.strategy": "the one date that all files of the folder get",
    "flower.two_party.*": "waits for the helper",
    "processes": "the time left of a bar, which a sweep of secure runs does not show",
    "runs.folder": "the one date that all files of the folder get",
    "runs.open_run": "the one date that all files of the folder get",
    "runs.run": "the one date that all files of the folder get",
    "simulation.heartbeat": "watches the other ranks",
    "simulation.rounds": "`seconds` of a record, which `recorded` leaves out of a secure run",
    "sweep.selection": "the one date that all files of the folder get",
    "trainers.*": "measures trainers on synthetic clients",
}
"""Every module that reads a clock, by its name in the package, and why no time of a secure run leaves through it."""


@cache
def right(outlet: str, field: str) -> Right | None:
    """By what right a field is public; None where it is not known to leave there at all."""
    for name, fields in OUTLETS.items():
        if fnmatchcase(outlet, name):
            return next((right for pattern, right in fields.items() if fnmatchcase(field, pattern)), None)
    return None


def recorded(outlet: str, values: Mapping[str, Any], *, secure: bool) -> dict[str, Any]:
    """What of `values` an outlet gets: in a secure run nothing that depends on the clients' data without noise.

    Raises `LookupError` for a field that the list does not know, so that a new one can't be written without a right.
    """
    rights = {field: right(outlet, field) for field in values}
    unknown = [field for field, known in rights.items() if known is None]
    if unknown:
        raise LookupError(f"{outlet} has no field {unknown[0]!r} in the list of everything that leaves a run.")
    return {field: value for field, value in values.items() if not (secure and rights[field] == "nonprivate")}
