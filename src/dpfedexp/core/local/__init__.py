"""Algorithm 3, the local update, and the protocol of a local optimiser.

A client takes τ steps w ← w − η_l·direction. The direction is the optimiser's own: it is written once, over tensors with a leading
client dimension, and serves one client or a whole chunk. Everything else about a step is the same for all optimisers and is not
theirs: the proximal pull and SCAFFOLD's correction come to the gradient before the optimiser sees it, and a client that has taken
all its steps stands still (`trainers/stepping.py`).
"""

from __future__ import annotations

from dpfedexp.core.local.adamw import AdamW
from dpfedexp.core.local.optimiser import Clock, Count, LocalOptimiser, Moments, as_rows
from dpfedexp.core.local.rates import SCHEDULES, CosineRate, RateSchedule, StepRate
from dpfedexp.core.local.sgd import FedProx, Sgd

__all__ = [
    "OPTIMISERS",
    "SCHEDULES",
    "AdamW",
    "Clock",
    "CosineRate",
    "Count",
    "FedProx",
    "LocalOptimiser",
    "Moments",
    "RateSchedule",
    "Sgd",
    "StepRate",
    "as_rows",
]

OPTIMISERS: dict[str, type[LocalOptimiser]] = {"sgd": Sgd, "adamw": AdamW}
"""The local optimisers by the names that configuration files use."""
