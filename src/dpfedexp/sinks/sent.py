"""What a sink may send, and the package that it needs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from dpfedexp.errors import InputError
from dpfedexp.runs.file_names import METRICS
from dpfedexp.runs.outlets import recorded


def sent(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round's record that may leave, without the round itself; none that depends on the clients without noise.

    >>> sent({"round": 3, "test_loss": 0.5, "seconds": 1.2, "nonprivate_eta_target": 7.0})
    {'test_loss': 0.5}
    """
    public = recorded(METRICS, record, secure=True)
    numbers = {name: value for name, value in public.items() if name != "round" and isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not math.isinf(value)}


def needed(sink: str, module: str, package: str) -> Any:
    """The module of an optional package; one sentence where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{sink} needs the package {package}, which is not installed; install it with: pip install 'dpfedexp[{package}]'."
        ) from None
