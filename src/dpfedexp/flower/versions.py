"""The one version of Flower whose private functions this library was read against."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from dpfedexp.errors import InputError

VERSION = "1.41.0"


def check_flower(command: str, module: Any = None, functions: Mapping[str, list[str]] | None = None) -> None:
    """Refuses any other version of Flower, and functions of its own that are missing or take other arguments.

    Args:
        command: what stands on them, such as "node", for the sentence.
        module: where the functions are.
        functions: names and the arguments that were there in `VERSION`.
    """
    import flwr

    def refuse(found: str) -> InputError:
        return InputError(
            f"dpfedexp {command} was made for flwr {VERSION}, and this is {flwr.__version__}{found}; install flwr=={VERSION}."
        )

    if flwr.__version__ != VERSION:
        raise refuse("")
    for name, expected in (functions or {}).items():
        function = getattr(module, name, None)
        if function is None or list(inspect.signature(function).parameters) != expected:
            state = "missing" if function is None else "another one"
            raise refuse(f", whose {module.__name__}.{name} is {state}")
