"""The server's folder: ledger, checkpoint, and at the end the model and the statement.

`dpfedexp.engine.outlets` says what each file is. Outside the folder, an anchor (`$DPFEDEXP_PRIVATE/ledgers`, see
`dpfedexp.engine`) remembers how far the ledger had come. Every charge moves it, on disk, before the round that it pays for is
released.

Formal guarantee: a run never goes on, and no new one begins, over a ledger that lacks a charge of a round that the folder's
checkpoint holds, or one that the anchor has seen: the whole folder put back to an earlier moment is refused. A ledger may be ahead
of its checkpoint and its anchor, as a crash between them leaves it; then the round is charged again. Of two copies of a folder one
goes on: the other is refused before its nodes are asked.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dpfedexp.accounting import Ledger, PrivacyStatement
from dpfedexp.accounting.ledger import Mark, head_path
from dpfedexp.core.layout import Params
from dpfedexp.engine.outlets import ADVICE, LEDGER, MODEL, SERVER_CHECKPOINT, STATEMENT, STATEMENT_TEXT, recorded
from dpfedexp.engine.plan import Advice
from dpfedexp.engine.private_folder import VARIABLE, OneWriter, SharedAnchor, root
from dpfedexp.errors import InputError, LedgerError, require
from dpfedexp.files import replace_tensors, replace_text
from dpfedexp.flower.server.checkpoint import Checkpoint, load_checkpoint


def open_folder(
    folder: Path, config: dict[str, Any], header: dict[str, Any], *, resume: bool
) -> tuple[Ledger, str, Checkpoint | None]:
    """The run's ledger, its name in it, and its last completed round. A run that is not resumed never touches another's files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"the folder {str(folder)!r} can't be written: {error.strerror}.") from None
    path = folder / LEDGER
    if not path.exists():
        _check_untouched(folder, path)
    settings = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()
    if not (resume and path.exists()):
        run = secrets.token_hex(16)
        _check_outside(folder)
        return (
            _anchored(Ledger.create(path, config_hash=settings, run=run, **header), path),
            run,
            None,
        )
    _check_outside(folder)
    ledger = Ledger.open(path, repair=True)
    try:
        last = load_checkpoint(folder)
        if last is None:
            run = _run_without_checkpoint(ledger, path, settings)
            return _anchored(ledger, path), run, None
        for name in {**config, **last.config}:
            before, value = last.config.get(name), config.get(name)
            require(
                before == value,
                f"the run in {str(folder)!r} has {name} {before!r}, but this one has {value!r}; resume with the same settings.",
            )
        _check_paid(ledger, path, last)
    except BaseException:
        ledger.close()
        raise
    return _anchored(ledger, path), last.run, last


def _check_outside(folder: Path) -> None:
    require(
        not root().resolve().is_relative_to(folder.resolve()),
        f"the private folder {str(root())!r} lies in the run's own folder {str(folder)!r}, with which it would be put back; set "
        f"{VARIABLE} to one outside.",
    )


def _anchored(ledger: Ledger, path: Path) -> Ledger:
    """The ledger, once its anchor has seen no more than it holds; from here on this is its only writer (`OneWriter`)."""

    def refusal(ledger: Ledger, known: Mark, anchor: Path) -> LedgerError:
        return LedgerError(
            f"{path} holds {len(ledger)} charges, and its anchor {str(anchor)!r} has seen {known.count}: the folder was put back "
            "to an earlier moment, the ledger was replaced, or another copy of the folder went on; restore the newest copy of the "
            "folder, or begin another run in a new one."
        )

    try:
        anchor = SharedAnchor.of(ledger.first_hash)
        writer = OneWriter(anchor, refusal)
        ledger.witnesses.append(writer)
        if anchor.mark() is None and len(ledger):
            raise LedgerError(
                f"the anchor {str(anchor.path)!r} of {path} is missing, so an older copy of the folder would go unnoticed; copy it "
                f"from where the run was begun, or set {VARIABLE} to the folder that holds it."
            )
        writer.move(ledger)
    except OSError as error:
        ledger.close()
        raise LedgerError(
            f"the anchor {str(root())!r} of {path} can't be written: {error.strerror}; set {VARIABLE} to a folder outside the "
            "run's own where it can, and move the anchor there."
        ) from None
    except BaseException:
        ledger.close()
        raise
    return ledger


def _check_untouched(folder: Path, path: Path) -> None:
    """Nothing in the folder says that there was a ledger."""
    traces = [p.name for p in (folder / SERVER_CHECKPOINT, head_path(path)) if p.exists()]
    if traces:
        raise LedgerError(
            f"{path} is missing beside {' and '.join(traces)}: what was released is not paid for anywhere; restore it from a "
            "back-up, or begin another run in a new folder."
        )


def _run_without_checkpoint(ledger: Ledger, path: Path, settings: str) -> str:
    """A run that was killed before its first round was complete goes on under its own name."""
    run = ledger.header.get("run")
    if not isinstance(run, str) or ledger.header.get("config") != settings:
        raise LedgerError(
            f"{path} is of a run with other settings, and no checkpoint is beside it; resume with the settings of that run, or "
            "begin another one in a new folder."
        )
    return run


def _check_paid(ledger: Ledger, path: Path, last: Checkpoint) -> None:
    """The ledger is the one that the checkpoint was written beside, as far as it was then, and pays for every round."""
    remedy = f"restore the newest {LEDGER} with its head from a back-up, or begin another run in a new folder."
    if ledger.header.get("run") != last.run:
        raise LedgerError(f"{path} is of another run than the checkpoint beside it; {remedy}")
    if len(ledger) < last.mark.count:
        raise LedgerError(
            f"{path} is older than the checkpoint beside it: it holds {len(ledger)} charges, and there were {last.mark.count} when "
            f"round {last.state.round} was complete; {remedy}"
        )
    if not ledger.holds(last.mark):
        raise LedgerError(f"{path} and the checkpoint beside it are not of the same history; {remedy}")
    paid = {entry.round for entry in ledger.entries[: last.mark.count] if entry.run == last.run}
    missing = [number for number in range(1, last.state.round + 1) if number not in paid]
    if missing:
        raise LedgerError(f"{path} holds no charge for round {missing[0]} of the checkpoint beside it; {remedy}")


def write_results(folder: Path, model: Params, statement: PrivacyStatement, advice: Iterable[Advice] = ()) -> None:
    tensors = {name: value.float().contiguous() for name, value in model.items()}
    replace_tensors(folder / MODEL, tensors)
    replace_text(folder / STATEMENT, statement.to_json() + "\n")
    replace_text(folder / STATEMENT_TEXT, statement.text + "\n")
    lines = (json.dumps(recorded(ADVICE, one.to_json(), secure=True)) + "\n" for one in advice)
    replace_text(folder / ADVICE, "".join(lines))
