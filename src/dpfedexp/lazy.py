"""Lazy imports of a package's public names, so that commands without torch start fast.

A package's `__init__.py` lists its public names as imports under `TYPE_CHECKING`, one per line; `lazy_names` reads them from there.
"""

import re
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from dpfedexp.errors import nearest

_IMPORT = re.compile(r"^    from (\S+) import (\w+) as \2$", re.MULTILINE)


def lazy_names(package: str, *ready: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package with lazy names (PEP 562); `ready` are its own names.

    An unknown name raises `AttributeError` with the nearest known name. Modules of the package can be accessed as attributes
    too, so that `import dpfedexp; dpfedexp.accounting` works.
    """
    spec = sys.modules[package].__spec__
    homes = {name: module for module, name in _IMPORT.findall(spec.loader.get_source(package))}  # type: ignore[union-attr]
    public = sorted([*homes, *ready])

    def load(name: str) -> Any:
        private = name.startswith("_")
        if name in homes:
            value = getattr(import_module(homes[name]), name)
        elif not private and find_spec(f"{package}.{name}") is not None:
            value = import_module(f"{package}.{name}")
        else:
            meant = "" if private else nearest(name, public)
            # `name` without `obj` keeps Python from adding its own suggestion to the message.
            raise AttributeError(f"module {package!r} has no attribute {name!r}.{meant}", name=name)
        # Later uses find the attribute without calling this function.
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *public})

    return load, names, public
