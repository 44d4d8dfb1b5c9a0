"""The names of the files in a run folder, for whoever writes or reads one."""

from __future__ import annotations

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
REPORT = "report.html"
"""The page that `dpfedexp report` writes."""
STATUS = "status.json"
"""How a deployment stands: running, completed, stopped or failed, in which round, at which ε."""


def server_tensors(round: int) -> str:
    """The file with the tensors of one round of a deployment."""
    return SERVER_TENSORS.replace("*", str(round))
