"""Files of an operator's limits: TOML that states all of them, and nothing that is not one."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from dpfedexp.errors import InputError, nearest, require
from dpfedexp.mechanisms.registry import check_name

NUMBERS = ("max_epsilon_per_round", "max_epsilon_total", "delta", "max_clip")


def read_limits(path: Path, what: str, needed: tuple[str, ...] = (), optional: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings of a file but its id, with the limits that every such file has checked, and `mechanisms` as a tuple.

    Args:
        path: the file.
        what: whose it is, for sentences: "guard" or "helper".
        needed: settings that it must have beside the limits.
        optional: settings that it may have.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"the {what} file {str(path)!r} can't be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"the {what} file {str(path)!r} is not valid TOML: {error}.") from None
    needed = (*NUMBERS, "mechanisms", *needed)
    for name in needed:
        require(name in values, f"the {what} file {str(path)!r} has no {name}; it must state all of its limits.")
    known = (*needed, *optional, "id")
    for name in values:
        require(name in known, f"{what}: {name} is not a setting.{nearest(name, known)}")
    for name in NUMBERS:
        value = values[name]
        good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        require(good, f"{what}: {name} is {value!r}; it must be a positive number.")
    require(values["delta"] < 1, f"{what}: delta is {values['delta']}; it must be below 1.")
    require(isinstance(values["mechanisms"], list), f"{what}: mechanisms must be a list of names.")
    for name in values["mechanisms"]:
        check_name(name, f"{what}: mechanism")
    name = values.pop("id", "unset")  # read where the ledger is opened (`guard_ledger.py`)
    good = isinstance(name, str) and name.isprintable() and 0 < len(name) <= 100
    require(good, f"{what}: id is {name!r}; it must be a name of 1 to 100 characters that no other {what} has.")
    return {**values, "mechanisms": tuple(values["mechanisms"])}
