"""Every file and field that a run writes or prints, and why each of them may be public.

released      computed from what the mechanism released, and from nothing else of the clients'
public        given by the person who started the run; does not depend on the clients' data
server        measured by the server on data of its own
accounting    what was charged, and names drawn at random
nonprivate    depends on the clients' data without noise: durations, sizes that a device chose, diagnostics

A run that protects real data (`secure`) writes nothing of the last kind. What is not in this list is not written: `recorded`
refuses it, and a test compares the files of whole runs with it. A run's private folder (`private_folder`) is not an outlet; it
stays with the holder of the data. The files of a secure run get one date when it ends, because the time between them is a
duration. Times of day and durations are in no outlet of a secure run: `CLOCKS` names every module that reads a clock, and why
nothing of it leaves such a run.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, cast

CONFIG = "config.toml"
"""The resolved settings of a run from the command line."""
FACTS = "run.json"
"""What the run is, in a few public facts, and the command or the call that made it."""
LEDGER = "ledger.jsonl"
"""What was charged, before each release."""
LEDGER_HEAD = "ledger.jsonl.head"
"""How many charges the ledger holds, and the hash of the last one."""
CHECKPOINT = "checkpoint.safetensors"
"""The last completed round."""
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
"""How a run stands: running, completed, stopped or failed, in which round, at which ε."""


Right = Literal["released", "public", "server", "accounting", "nonprivate"]
Fields = dict[str, Right]


def _fields(**names: str) -> Fields:
    """Field → right, from right → fields; of two patterns that fit a field the earlier one holds."""
    return {field: cast(Right, right) for right, fields in names.items() for field in fields.split()}


ROUND = _fields(
    # How many nodes were asked and answered is public where the mechanism's promise does not rest on hiding it.
    public="round asked valid refused missing",
    # An automatic local rate follows from votes; `update_norm` is ‖c̄‖ of the round's released mean.
    # What clients measured of the model has noise of its own.
    released="eta_g clip noisy_mean_* local_rate update_norm clients_* candidate candidates",
    accounting="epsilon_total",
    nonprivate="seconds nonprivate_*",
    # Whatever else a record holds came from `test` or `evaluate`.
    server="*",
)
OUTLETS: Mapping[str, Fields] = {
    LEDGER: _fields(
        public="format version config algorithm clients delta simulated noise_cohort stand_ins selection_runs selection_mu round "
        "no_other_adjacency evaluation votes",
        # What the mechanism is; under an adaptive clip its radius, which was released the round before.
        released="event seal",
        accounting="run seq noise previous hash",
    ),
    LEDGER_HEAD: _fields(accounting="count hash"),
    CHECKPOINT: _fields(
        public="format version round settings controls cohort stop_source",
        # `history` holds the records of the rounds, each by the rights of `ROUND`.
        released="w recent.* server.* memory.* control candidate rivals.* tensors radius history",
        accounting="run ledger",
        nonprivate="chunk_size trainer",
    ),
    METRICS: ROUND,
    METRICS_TABLE: ROUND,
    CONFIG: _fields(public="*"),
    # How updates were computed depends on sizes; why a run stopped, on what it released and what the server measured.
    FACTS: _fields(nonprivate="trainer", released="stopped", accounting="run", public="*"),
    MODEL: _fields(released="*"),
    STATEMENT: _fields(accounting="*"),
    STATEMENT_TEXT: _fields(accounting="*"),
    # Made from public numbers, records of rounds and norms of the released model.
    ADVICE: _fields(released="level code sentence"),
    # A traceback may hold anything.
    ERROR: _fields(nonprivate="text"),
    # Of a sweep or a selection, made from the files of its runs.
    "sweep.json": _fields(released="*"),
    "selection.json": _fields(public="*"),
    "selection.txt": _fields(released="*"),
    # Drawn from the files above, by `dpfedexp report`.
    **dict.fromkeys((REPORT, "*.svg", "*.png", "*.pdf"), _fields(released="*")),
    # `reason` is what the server's error says.
    STATUS: _fields(public="status round rounds delta", released="reason", accounting="epsilon"),
    "terminal": _fields(nonprivate="elapsed") | ROUND,
    **dict.fromkeys(("tensorboard", "mlflow", "wandb"), ROUND),
    "log": _fields(nonprivate="*"),
}
CLOCKS: Mapping[str, str] = {
    "audit.*": "audits measure mechanisms on synthetic clients",
    "cli.selection": "the one date that all files of the folder get",
    "cli.train": "the default name of a folder has the time at which the run was started",
    "engine.open_run": "the one date that all files of the folder get",
    "engine.ranks": "watches the other ranks",
    "engine.engine": "`seconds` of a record, which `recorded` leaves out of a secure run",
    "engine.run": "the one date that all files of the folder get",
    "flower.guard": "the note of a charge in the node's own ledger, which stays with the node",
    "flower.local_deployment": "waits for processes of a federation on this machine, and dates its certificates",
    "flower.cohort": "waits for nodes, replies and the helper; what the server's own log says of it has Flower's time of day",
    "flower.site": "waits for the app and for requests",
    "machine": "the time left of a bar, which a sweep of secure runs does not show",
    "trainers.*": "measures trainers on synthetic clients",
}
"""Every module that reads a clock, by its name in the package, and why no time of a secure run leaves through it."""


@cache
def right(outlet: str, field: str) -> Right | None:
    """Why a field may be public; None for a field that is not listed."""
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
