"""The server's folder: ledger, checkpoint, and at the end the model and the statement.

ledger.jsonl         what was charged
checkpoint.json      the last completed round, with round-<n>.safetensors
model.safetensors    the reported model
privacy.json/txt     the statement
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save

from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.errors import InputError, require
from dpfedexp.flower.checkpoint import Checkpoint, load_checkpoint, write_atomically
from dpfedexp.local import Params


def open_folder(
    folder: Path, config: dict[str, Any], header: dict[str, Any], *, resume: bool
) -> tuple[Ledger, Checkpoint | None]:
    """The run's ledger and its last completed round. A run that is not resumed never touches the files of another."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None
    path = folder / "ledger.jsonl"
    if not (resume and path.exists()):
        return Ledger.create(path, **header), None
    ledger = Ledger.open(path, repair=True)
    try:
        last = load_checkpoint(folder)
        for name, value in config.items() if last is not None else ():
            before = last.config.get(name) if last else None
            require(
                before == value,
                f"the run in {str(folder)!r} has {name} {before!r}, but this one has {value!r}; resume with the same settings.",
            )
    except BaseException:
        ledger.close()
        raise
    return ledger, last


def write_results(folder: Path, model: Params, statement: PrivacyStatement) -> None:
    tensors = {name: value.float().contiguous() for name, value in model.items()}
    write_atomically(folder / "model.safetensors", save(tensors))
    write_atomically(folder / "privacy.json", (statement.to_json() + "\n").encode())
    write_atomically(folder / "privacy.txt", (statement.text + "\n").encode())
