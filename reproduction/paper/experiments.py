"""The paper's runs as settings: the TOML files of `reproduction/experiments/`, which also work with `dpfedexp train`."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import Any

from dpfedexp.config import Settings, load, parse
from dpfedexp.errors import InputError, nearest


def names() -> list[str]:
    return sorted(
        f.name.removesuffix(".toml") for f in files("reproduction.experiments").iterdir() if f.name.endswith(".toml")
    )


def experiment(name: str) -> Settings:
    """The settings of one of the paper's runs, such as `mnist-cdp-fedexp`."""
    if name not in names():
        raise InputError(f"experiment is {name!r}, which does not exist.{nearest(name, names())}")
    with as_file(files("reproduction.experiments") / f"{name}.toml") as path:
        return load(path)


def vary(settings: Settings, changes: dict[str, Any]) -> Settings:
    """The same settings but for `{"algorithm.clip": 0.5, …}`; None takes a setting away."""
    tree = settings.model_dump(exclude_none=True)
    for key, value in changes.items():
        section, _, name = key.partition(".")
        branch = tree.setdefault(section, {})
        if value is None:
            branch.pop(name, None)
        else:
            branch[name] = value
    return parse(tree)
