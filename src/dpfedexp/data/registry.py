"""Data sets by name, for configuration files. A new one is a file with a function that loads it, and a line here.

Nothing is imported before a data set is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from dpfedexp.errors import InputError, nearest


@dataclass(frozen=True)
class DataSet:
    """Examples that a partition deals out to clients, and examples of the server's own.

    Args:
        inputs: one row per example, as a tensor or an array.
        targets: one per example.
        test: (inputs, targets) of the server's own, None where there are none.
    """

    inputs: Any
    targets: Any
    test: tuple[Any, Any] | None = None


@dataclass(frozen=True)
class Entry:
    """One data set.

    Args:
        home: the function from a folder (or None) to a `DataSet`, as "module:name".
        summary: one line for people who choose.
        model: the network that is used where the configuration names none.
        standard: the public mean and standard deviation of its inputs, for `standardise = true`; None where nobody published them.
    """

    home: str
    summary: str
    model: str | None = None
    standard: tuple[float, float] | None = None

    def load(self, folder: str | None) -> DataSet:
        module, _, name = self.home.partition(":")
        loader: Callable[[str | None], DataSet] = getattr(import_module(module), name)
        return loader(folder)


OTHER_KINDS = {
    "synthetic": "the paper's linear regression, made up",
    "npz": "arrays of your own in a file",
    "factory": "a function of your own",
}
"""Kinds of data that are no data set: they say who the clients are by themselves."""

DATA_SETS: dict[str, Entry] = {
    "mnist": Entry(
        "dpfedexp.data.mnist:mnist",
        "MNIST, or another set in its four files",
        model="mnist_cdp_net",
        standard=(0.1307, 0.3081),
    ),
    "cifar10": Entry(
        "dpfedexp.data.cifar10:cifar10",
        "CIFAR-10 in its binary files",
        model="cifar_net",
        standard=(0.4734, 0.2516),
    ),
}


def check_kind(kind: str) -> None:
    """One sentence for a kind of data that does not exist."""
    known = (*OTHER_KINDS, *DATA_SETS)
    if kind not in known:
        raise InputError(f"data.kind is {kind!r}, which does not exist.{nearest(kind, known)}")
