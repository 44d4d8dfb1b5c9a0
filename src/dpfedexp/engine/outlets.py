"""The names of the files in a run folder, for whoever writes or reads one."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal

CONFIG = "config.toml"
"""The resolved settings of a run from the command line."""
FACTS = "run.json"
"""What the run is, in a few public facts, and the command or the call that made it."""
LEDGER = "ledger.jsonl"
"""What was charged, before each release."""
LEDGER_HEAD = "ledger.jsonl.head"
"""How many charges the ledger holds, and the hash of the last one."""
CHECKPOINT = "checkpoint.safetensors"
"""The last completed round of a simulation."""
SERVER_CHECKPOINT = "checkpoint.json"
"""The last completed round of a deployment; it names its tensors (`server_tensors`)."""
SERVER_TENSORS = "round-*.safetensors"
"""The tensors of that round, and of an earlier one whose parameters the reported model averages."""
METRICS = "metrics.jsonl"
"""One record per round."""
METRICS_TABLE = "metrics.csv"
"""The same as a table."""
MODEL = "model.safetensors"
"""The trained parameters."""
STATEMENT = "privacy.json"
"""The privacy statement, for programs."""
STATEMENT_TEXT = "privacy.txt"
"""The privacy statement, for people."""
ADVICE = "advice.jsonl"
"""What there was to say about the run (docs/advice.md); empty where there was nothing."""
ERROR = "error.txt"
"""What a run of a sweep that failed said; not of a secure one."""
REPORT = "report.html"
"""The page that `dpfedexp report` writes."""
STATUS = "status.json"
"""How a deployment stands: running, completed, stopped or failed, in which round, at which ε."""


def server_tensors(round: int) -> str:
    """The file with the tensors of one round of a deployment."""
    return SERVER_TENSORS.replace("*", str(round))


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
    "flower.link.*": "waits for processes and connections",
    "flower.local.*": "waits for processes of a federation on this machine",
    "flower.node.*": "waits for the app and for requests",
    "flower.server.nodes": "waits for nodes and replies; what the server's own log says of it has Flower's time of day",
    "flower.server.strategy": "the one date that all files of the folder get",
    "flower.two_party.*": "waits for the helper",
    "machine": "the time left of a bar, which a sweep of secure runs does not show",
    "engine.open_run": "the one date that all files of the folder get",
    "engine.run": "the one date that all files of the folder get",
    "engine.ranks": "watches the other ranks",
    "engine.rounds": "`seconds` of a record, which `recorded` leaves out of a secure run",
    "cli.selection": "the one date that all files of the folder get",
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
