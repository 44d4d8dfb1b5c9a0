"""What JSON can hold: it has no infinity and no NaN."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """The value with null for every number that JSON has no word for, in lists and mappings too.

    >>> finite({"epsilon": float("inf"), "history": [1.0, float("nan")]})
    {'epsilon': None, 'history': [1.0, None]}
    """
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
