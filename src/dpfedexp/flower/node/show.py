"""What a site has spent under its guard file, read without changing anything."""

from __future__ import annotations

from typing import Any

from dpfedexp.accounting import Ledger, chain
from dpfedexp.errors import LedgerError
from dpfedexp.flower.node.guard import Guard
from dpfedexp.flower.node.guard_ledger import anchor_path, check_marks, check_missing
from dpfedexp.flower.node.price import total


def guard_summary(guard: Guard, last: int = 10) -> dict[str, Any]:
    """The limits, what was charged, and whether the ledger is one that the node would use.

    Args:
        guard: the site's limits.
        last: how many of the newest charges to list.

    Returns:
        "problem" is "" where all is well, otherwise what the node would refuse with.
    """
    summary: dict[str, Any] = {
        "guard": str(guard.path),
        "max_epsilon_total": guard.max_epsilon_total,
        "max_epsilon_per_round": guard.max_epsilon_per_round,
        "delta": guard.delta,
        "charges": 0,
        "epsilon": 0.0,
        "apps": list(guard.apps),
        "last": [],
        "problem": "",
    }
    if not guard.ledger.exists():
        try:
            check_missing(guard.ledger, anchor_path(guard.path))
        except LedgerError as error:
            summary["problem"] = str(error)
        return summary
    try:
        ledger = Ledger.open(guard.ledger, read_only=True)
        check_marks(guard.ledger, anchor_path(guard.path), ledger)
        summary["charges"], summary["epsilon"] = (
            len(ledger),
            total(ledger.charges(), guard.delta) if len(ledger) else 0.0,
        )
        lines = chain.read(guard.ledger).records[-last:] if last else []
        summary["last"] = [{key: line.get(key, "") for key in ("time", "run", "round", "app")} for line in lines]
    except LedgerError as error:
        summary["problem"] = str(error)
    return summary
