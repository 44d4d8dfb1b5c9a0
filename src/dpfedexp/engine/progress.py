"""A progress bar over rounds that shows what may be shown."""

from __future__ import annotations

import math
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dpfedexp.engine.outlets import recorded

LARGER = "of the larger deployment"
"""Whose ε it is where few clients stand for many."""


class RoundProgress:
    """`with RoundProgress("cdp_fedexp", 50) as bar: bar.update(record)`; silent when disabled or when there is no terminal.

    In a secure run it shows no durations, which depend on what the clients hold. `whose` says whose ε it is, where it is not that
    of the run's own clients.
    """

    def __init__(self, name: str, rounds: int, enabled: bool = True, *, secure: bool = False, whose: str = "") -> None:
        times = bool(recorded("terminal", {"elapsed": None}, secure=secure))
        self.whose = whose
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            *([TimeElapsedColumn(), TimeRemainingColumn()] if times else []),
            TextColumn("{task.fields[shown]}"),
            transient=True,
            disable=not enabled,
        )
        self.row = self.bar.add_task(name, total=rounds, shown="")

    def __enter__(self) -> RoundProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def update(self, record: dict[str, Any]) -> None:
        self.bar.update(self.row, completed=record["round"], shown=show(record, self.whose))


def show(record: dict[str, Any], whose: str = "") -> str:
    """The public values of a round in one line; `whose` ε it is, where it is not that of the run's own clients."""
    metrics = [
        f"{key.removeprefix('test_')} {value:.4g}"
        for key, value in recorded("terminal", record, secure=True).items()
        if isinstance(value, float) and key not in ("eta_g", "clip", "update_norm", "vote_within_clip", "epsilon_total")
    ]
    epsilon = record["epsilon_total"]
    privacy = "not private" if math.isinf(epsilon) else f"ε {whose}{' ' if whose else ''}{epsilon:.3f}"
    return "  ".join([*metrics, f"η_g {record['eta_g']:.2f}", privacy])
