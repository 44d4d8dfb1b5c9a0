"""The files that hold what a run came to, written from plain values and read back. `file_names` says what each file is."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.engine import checkpoint
from dpfedexp.engine.advice.message import Advice
from dpfedexp.engine.file_names import ADVICE, LEDGER, METRICS, METRICS_TABLE, MODEL, STATEMENT, STATEMENT_TEXT
from dpfedexp.engine.outlets import recorded
from dpfedexp.errors import InputError
from dpfedexp.files import replace_tensors, replace_text
from dpfedexp.json_values import finite

Record = dict[str, Any]


def write_history(folder: Path, history: Sequence[Record]) -> None:
    replace_text(folder / METRICS, "".join(map(line, history)))


def write_results(
    folder: Path, model: nn.Module, history: Sequence[Record], advice: Sequence[Advice], *, secure: bool
) -> None:
    """Metrics, parameters and advice; `OSError` where one can't be written."""
    write_history(folder, history)
    write_csv(folder / METRICS_TABLE, history)
    # Parameters that share their storage, such as tied embeddings, are written twice: the format has no word for it.
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in model.state_dict().items()}
    replace_tensors(folder / MODEL, tensors)
    lines = (line(recorded(ADVICE, one.to_json(), secure=secure)) for one in advice)
    replace_text(folder / ADVICE, "".join(lines))


def write_statement(folder: Path, privacy: PrivacyStatement) -> None:
    replace_text(folder / STATEMENT, privacy.to_json() + "\n")
    replace_text(folder / STATEMENT_TEXT, privacy.text + "\n")


def write_ledger(folder: Path, ledger: Ledger, header: Mapping[str, Any]) -> None:
    """A copy of a ledger, charge by charge. `header` describes the run it is for: another one may have begun the ledger."""
    own = {name: value for name, value in ledger.header.items() if name not in ("format", "version", "config")}
    with Ledger.create(folder / LEDGER, config_hash=str(ledger.header.get("config", "")), **{**own, **header}) as copy:
        for entry in ledger.entries:
            copy.charge(entry.round, entry.event, run=entry.run, noise=entry.noise)


def read_history(folder: Path) -> list[Record]:
    """The records of the rounds: of the metrics, or where there are none yet of the checkpoint."""
    path = folder / METRICS
    if not path.is_file():
        progress = checkpoint.read_progress(folder)
        return [] if progress is None else list(progress.history)
    history = []
    lines = read_text(path).splitlines()
    for number, text in enumerate(lines, 1):
        try:
            record = json.loads(text)
            record["round"] = int(record["round"])
            history.append(record)
        except (ValueError, KeyError, TypeError, RecursionError):
            # A run that was cut off may have left half a last line.
            if number < len(lines):
                raise InputError(f"the file {str(path)!r} has no round in line {number}: {text[:60]!r}.") from None
    return history


def numbers(record: Record) -> Record:
    """A record as the run had it: what JSON has no word for is an infinite ε, and else not a number."""
    absent = {"epsilon_total": math.inf}
    return {name: absent.get(name, math.nan) if value is None else value for name, value in record.items()}


def read_advice(folder: Path) -> tuple[Advice, ...]:
    """What the run said about itself; nothing where there is no such file."""
    path = folder / ADVICE
    try:
        return tuple(Advice(**json.loads(one)) for one in read_text(path, optional=True).splitlines())
    except (ValueError, TypeError):
        raise InputError(f"the file {str(path)!r} does not hold advice, one JSON object to a line.") from None


def read_parameters(folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    path = folder / MODEL
    if not path.is_file():
        raise InputError(
            f"the folder {str(folder)!r} has no {MODEL}: the run in it has not finished; finish it with resume."
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error}.") from None


def read_text(path: Path, optional: bool = False) -> str:
    if optional and not path.is_file():
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the file {str(path)!r} can't be read: {error}.") from None


def line(record: Mapping[str, Any]) -> str:
    """One line of JSON."""
    return json.dumps(finite(dict(record))) + "\n"


def write_csv(path: Path, records: Sequence[Record]) -> None:
    columns = list(dict.fromkeys(key for record in records for key in record))
    table = io.StringIO(newline="")
    writer = csv.DictWriter(table, columns)
    writer.writeheader()
    writer.writerows(records)
    replace_text(path, table.getvalue())
