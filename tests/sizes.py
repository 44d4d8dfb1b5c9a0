"""How much a test tries: enough to notice in `make test`, and all of it in `make test-long`."""

import os
from typing import TypeVar

import pytest

LONG = os.environ.get("DPFEDEXP_SLOW") == "1"
long = pytest.mark.skipif(not LONG, reason="takes minutes: make test-long")

T = TypeVar("T")


def sized(short: T, whole: T) -> T:
    return whole if LONG else short
