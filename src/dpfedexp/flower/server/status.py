"""How a run stands, in a file that anybody may read: `status.json`.

    {"status": "running", "round": 3, "rounds": 10, "epsilon": 2.1, "delta": 1e-05, "reason": ""}

Everything in it is public: ε follows from the ledger, and a reason is what the server's log and error say. There is no time in
it: how long a round took depends on the clients.

A server app that was killed can't say so. It holds a lock on its ledger while it runs, so a status "running" beside a ledger that
nobody holds means "killed". Only the machine that it ran on can tell.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from dpfedexp.accounting import PrivacyStatement
from dpfedexp.engine.outlets import LEDGER, STATUS, recorded
from dpfedexp.errors import InputError
from dpfedexp.files import finite, replace_text

Status = Literal["running", "completed", "stopped", "failed"]
EXIT_CODES = {"completed": 0, "running": 0, "stopped": 3, "failed": 3, "killed": 4}


def write_status(
    folder: Path, status: Status, round: int, rounds: int, statement: PrivacyStatement, reason: str = ""
) -> None:
    content = {
        "status": status,
        "round": round,
        "rounds": rounds,
        "epsilon": statement.epsilon_total,
        "delta": statement.delta,
        "reason": reason,
    }
    replace_text(folder / STATUS, json.dumps(finite(recorded(STATUS, content, secure=True))) + "\n")


def read_status(folder: Path | str) -> dict[str, Any]:
    """What the file says, with "killed" where the run is not running any more and did not say how it ended."""
    path = Path(folder) / STATUS
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = content["status"] in EXIT_CODES
    except FileNotFoundError:
        raise InputError(f"{str(path)!r} does not exist; a server app writes it when it begins.") from None
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise InputError(f"{str(path)!r} can't be read; it is written anew after the next round.")
    status: dict[str, Any] = content
    if status["status"] == "running" and not _is_held(Path(folder) / LEDGER):
        status |= {"status": "killed", "reason": "the server app ended without a word; resume to go on."}
    return status


def _is_held(ledger: Path) -> bool:
    """Whether some process holds the ledger's lock; True where that can't be told."""
    try:
        import fcntl

        descriptor = os.open(ledger, os.O_RDONLY)
    except (ImportError, OSError):
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
