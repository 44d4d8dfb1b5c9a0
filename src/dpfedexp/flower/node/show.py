"""What was spent under a guard file or a helper's file, read without changing anything."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any, Protocol

from dpfedexp.accounting.ledger import read_chain
from dpfedexp.errors import LedgerError
from dpfedexp.flower.node.guard import Guard
from dpfedexp.flower.node.guard_ledger import Place, read_ledger
from dpfedexp.flower.node.price import total
from dpfedexp.flower.two_party.helper_file import HelperFile


class Limits(Protocol):
    """What a guard and a helper's file have in common."""

    @property
    def path(self) -> Path: ...
    @property
    def max_epsilon_per_round(self) -> float: ...
    @property
    def max_epsilon_total(self) -> float: ...
    @property
    def delta(self) -> float: ...


def load_limits(path: Path) -> Limits:
    """The limits in a guard file, or in a helper's file, which names a private key."""
    try:
        helps = "private_key" in tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        helps = False
    return HelperFile.load(path) if helps else Guard.load(path)


def guard_summary(guard: Limits, last: int = 10) -> dict[str, Any]:
    """The limits, what was charged, and whether the ledger is one that the node would use.

    Args:
        guard: a site's limits, or a helper's.
        last: how many of the newest charges to list.

    Returns:
        "problem" is "" where all is well, otherwise what the node would refuse with. "id" is None before the first use.
    """
    summary: dict[str, Any] = {
        "guard": str(guard.path),
        "id": None,
        "max_epsilon_total": guard.max_epsilon_total,
        "max_epsilon_per_round": guard.max_epsilon_per_round,
        "delta": guard.delta,
        "charges": 0,
        "epsilon": 0.0,
        "apps": list(getattr(guard, "apps", ())),
        "last": [],
        "problem": "",
    }
    try:
        place = Place.of(guard.path)
        summary["id"] = place.id
        ledger = read_ledger(place)
        if ledger is not None and len(ledger):
            summary["charges"], summary["epsilon"] = len(ledger), total(ledger.charges(), guard.delta)
            lines = read_chain(place.ledger).records[-last:] if last else []
            summary["last"] = [{key: line.get(key, "") for key in ("time", "run", "round", "app")} for line in lines]
    except LedgerError as error:
        summary["problem"] = str(error)
    return summary
