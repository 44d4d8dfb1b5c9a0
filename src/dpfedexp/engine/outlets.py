"""Every file and field that a run writes or prints, and why each of them may be public.

released      computed from released values, and from nothing else that depends on the clients' data
public        given by the person who started the run; does not depend on the clients' data
server        measured by the server on its own data
accounting    charges, and random names
nonprivate    depends on the clients' data without noise: durations, sizes chosen on a device, diagnostics

An outlet is a file, log or service that gets values of a run. A run that protects real data (`secure`) writes nothing of the kind
`nonprivate`. A field that `OUTLETS` does not list is refused by `recorded`, and a test compares the files of whole runs with the
list. A run's private folder (`private_folder`) is not an outlet; it stays with the holder of the data. Secure runs write no times
of day and no durations: their files get one common date at the end, and a test lists every module that reads a clock.
"""

from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Literal, cast

CONFIG = "config.toml"
"""The resolved settings of a run from the command line."""
FACTS = "run.json"
"""A few public facts about the run, and the command or the call that started it."""
LEDGER = "ledger.jsonl"
"""The charges, each written before its release."""
LEDGER_HEAD = "ledger.jsonl.head"
"""The number of charges in the ledger, and the hash of the last one."""
CHECKPOINT = "checkpoint.safetensors"
"""The state after the last completed round, from which a run resumes."""
METRICS = "metrics.jsonl"
"""One record per round."""
METRICS_TABLE = "metrics.csv"
"""The records as a table."""
MODEL = "model.safetensors"
"""The trained parameters."""
STATEMENT = "privacy.json"
"""The privacy statement as JSON."""
STATEMENT_TEXT = "privacy.txt"
"""The privacy statement as text."""
ADVICE = "advice.jsonl"
"""The advice about the run (docs/advice.md); empty where there was none."""
ERROR = "error.txt"
"""The error of a failed run in a sweep; not written by secure runs."""
REPORT = "report.html"
"""The page that `dpfedexp report` writes."""
STATUS = "status.json"
"""The status of a run: running, completed, stopped or failed, with round and ε."""


Right = Literal["released", "public", "server", "accounting", "nonprivate"]
Fields = dict[str, Right]


def _fields(**names: str) -> Fields:
    """Invert right → fields to field → right. If two patterns match a field, the earlier one counts."""
    return {field: cast(Right, right) for right, fields in names.items() for field in fields.split()}


ROUND = _fields(
    # The numbers of nodes that were asked and answered are public unless the mechanism's guarantee needs them hidden.
    public="round asked valid refused missing",
    # An automatic local rate is computed from votes; `update_norm` is ‖c̄‖ of the round's released mean.
    # Metrics that clients measured (`clients_*`) have their own noise.
    released="eta_g clip noisy_mean_* local_rate update_norm clients_* candidate candidates",
    accounting="epsilon_total",
    nonprivate="seconds nonprivate_*",
    # All other fields of a record come from `test` or `evaluate`.
    server="*",
)
OUTLETS: Mapping[str, Fields] = {
    LEDGER: _fields(
        # The terms of a run: `reporting` is the public number of clients that report, as in the history.
        public="format version config algorithm clients delta simulated noise_cohort stand_ins round no_other_adjacency "
        "evaluation votes planned_rounds not_covered reporting stopping complete terms",
        # The event describes the mechanism; the radius of an adaptive clip was released in the round before.
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
    # The choice of the trainer depends on sizes; the reason of a stop depends on released values and server metrics.
    FACTS: _fields(nonprivate="trainer", released="stopped", accounting="run", server="baselines", public="*"),
    MODEL: _fields(released="*"),
    STATEMENT: _fields(accounting="*"),
    STATEMENT_TEXT: _fields(accounting="*"),
    # Made from public numbers, records of rounds and norms of the released model.
    ADVICE: _fields(released="level code sentence"),
    # A traceback may hold anything.
    ERROR: _fields(nonprivate="text"),
    # A sweep computes it from the files of its runs.
    "sweep.json": _fields(released="*"),
    # Drawn from the files above, by `dpfedexp report`.
    **dict.fromkeys((REPORT, "*.svg", "*.png", "*.pdf"), _fields(released="*")),
    # `reason` is the message of the server's error.
    STATUS: _fields(public="status round rounds delta", released="reason", accounting="epsilon"),
    "terminal": _fields(nonprivate="elapsed") | ROUND,
    **dict.fromkeys(("tensorboard", "mlflow", "wandb"), ROUND),
    "log": _fields(nonprivate="*"),
}


@cache
def right(outlet: str, field: str) -> Right | None:
    """The reason (`Right`) why an outlet may get a field, from the list `OUTLETS`; None for a field that is not listed."""
    for name, fields in OUTLETS.items():
        if fnmatchcase(outlet, name):
            return next((right for pattern, right in fields.items() if fnmatchcase(field, pattern)), None)
    return None


def recorded(outlet: str, values: Mapping[str, Any], *, secure: bool) -> dict[str, Any]:
    """The fields of `values` that an outlet may get: all of them, but in a secure run no `nonprivate` field.

    Raises `LookupError` for a field that `OUTLETS` does not list, so that a new field can't be written without a right.
    """
    rights = {field: right(outlet, field) for field in values}
    unknown = [field for field, known in rights.items() if known is None]
    if unknown:
        raise LookupError(f"{outlet} has no field {unknown[0]!r} in the list of everything that leaves a run.")
    return {field: value for field, value in values.items() if not (secure and rights[field] == "nonprivate")}
