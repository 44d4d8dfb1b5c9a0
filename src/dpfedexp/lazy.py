"""Lazy imports of a package's public names, so that commands without torch start fast.

A package's `__init__.py` lists them once, as imports under `TYPE_CHECKING`, one to a line; the list is read from the source.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from dpfedexp.errors import nearest

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(package: str, *ready: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """What a package of lazy names needs: its `__getattr__`, `__dir__` and `__all__` (PEP 562); it defines `ready` by itself.

    A name that does not exist is an `AttributeError` that says which one was probably meant. A module of the package is a name
    too, so that `import dpfedexp; dpfedexp.accounting` works.
    """
    spec = sys.modules[package].__spec__
    homes = {name: module for module, name in _IMPORT.findall(spec.loader.get_source(package))}  # type: ignore[union-attr]
    public = sorted([*homes, *ready])

    def load(name: str) -> Any:
        if name in homes:
            value = getattr(import_module(homes[name]), name)
        else:
            private = name.startswith("_")
            try:
                value = None if private else import_module(f"{package}.{name}")
            except ModuleNotFoundError as error:
                if error.name != f"{package}.{name}":
                    raise
                value = None
            if value is None:
                meant = "" if private else nearest(name, public)
                # With a name but no object Python's traceback does not add a suggestion of its own after ours.
                raise AttributeError(f"module {package!r} has no attribute {name!r}.{meant}", name=name)
        # The next use finds it without asking here.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return load, names, public
