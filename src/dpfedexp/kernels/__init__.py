"""What torch's own operations leave slow on a GPU, written for triton, which torch brings along on CUDA."""

import importlib.util
from functools import lru_cache


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether files that are written for triton can be imported."""
    return importlib.util.find_spec("triton") is not None
