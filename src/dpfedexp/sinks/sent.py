"""What a sink may send and when, and the package that it needs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar

from dpfedexp.engine.facts import RunFacts
from dpfedexp.engine.file_names import FACTS
from dpfedexp.engine.outlets import recorded
from dpfedexp.engine.run import Run
from dpfedexp.errors import InputError

SHOWN_FACTS = ("algorithm", "data", "model", "clients", "parameters", "rounds", "delta", "secure")


class Sink(ABC):
    """Sends the rounds of a run; give it as `on_round`.

    Formal guarantee: what is sent is in the list of everything that leaves a run (`runs.outlets`, under `outlet`), and nothing
    of it depends on the clients without noise. In a secure run everything is sent after the last round, because the moment at which
    a round arrives tells how long it took; other runs send each round at once.

    Attributes:
        outlet: its name in the list.
    """

    outlet: ClassVar[str]
    _held: list[dict[str, Any]] | None = None
    _is_open = False

    def begun(self, facts: RunFacts) -> None:
        """The run begins; a secure one is held back until its end."""
        self._held = [] if facts.secure else None

    def __call__(self, record: dict[str, Any]) -> None:
        if self._held is not None:
            self._held.append(dict(record))
            return
        self._open_once()
        self._send(record["round"], sent(self.outlet, record))

    def finished(self, run: Run) -> None:
        """What was held back, what the run is, what it promises, and the end."""
        self._open_once()
        for record in self._held or ():
            self._send(record["round"], sent(self.outlet, record))
        self._held = None
        self._end(run, shown_facts(run))

    def _open_once(self) -> None:
        if not self._is_open:
            self._open()
        self._is_open = True

    @abstractmethod
    def _open(self) -> None:
        """Begins to send."""

    @abstractmethod
    def _send(self, round: int, values: dict[str, float]) -> None:
        """Sends the numbers of a round, without any time but the number of the round."""

    @abstractmethod
    def _end(self, run: Run, facts: dict[str, Any]) -> None:
        """Sends the facts and the statement, and ends."""


def sent(outlet: str, record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a round's record that may leave, without the round itself; none that depends on the clients without noise.

    >>> sent("tensorboard", {"round": 3, "test_loss": 0.5, "seconds": 1.2, "nonprivate_eta_target": 7.0})
    {'test_loss': 0.5}
    """
    public = recorded(outlet, record, secure=True)
    numbers = {name: value for name, value in public.items() if name != "round" and isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if not math.isinf(value)}


def shown_facts(run: Run) -> dict[str, Any]:
    """What the run is, in the public facts that a sink shows."""
    if run.facts is None:
        return {}
    return recorded(FACTS, {name: getattr(run.facts, name) for name in SHOWN_FACTS}, secure=True)


def needed(sink: str, module: str, package: str) -> Any:
    """The module of an optional package; one sentence where it is not installed."""
    try:
        return import_module(module)
    except ImportError:
        raise InputError(
            f"{sink} needs the package {package}, which is not installed; install it with: pip install 'dpfedexp[{package}]'."
        ) from None
