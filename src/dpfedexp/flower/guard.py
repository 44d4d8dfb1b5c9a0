"""The node operator's own limits: a file beside the node that the server and the uploaded app have no say in.

    max_epsilon_per_round = 4.0
    max_epsilon_total = 20.0
    delta = 1e-5
    mechanisms = ["local-gaussian", "privunit"]
    max_clip = 1.0

Its path comes from the node's own configuration (`--node-config 'dpfedexp-guard="…"'`) or environment (DPFEDEXP_GUARD), never from
a message. What was spent is kept in a ledger next to it, `<name>.ledger.jsonl`, over all runs and restarts. A node takes part only
if the round is within every limit, and the round is charged before the report exists.

A client does not trust what it can't see: it charges every round that it answers at full price, as if it had been sure to take
part, and for the replacement of all of its data.
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpfedexp.accounting import Event, GaussianEvent, Ledger, Sampling
from dpfedexp.accounting.compose import Charges, compose
from dpfedexp.errors import InputError, LedgerError, nearest, require
from dpfedexp.flower.spec import KINDS, kind_of
from dpfedexp.mechanisms import CentralGaussian, Mechanism

NODE_KEY = "dpfedexp-guard"
VARIABLE = "DPFEDEXP_GUARD"


class Refused(RuntimeError):
    """The node does not take part; the message says why and holds nothing about its data."""


@dataclass(frozen=True)
class Guard:
    """What one node agrees to."""

    path: Path
    max_epsilon_per_round: float
    max_epsilon_total: float
    delta: float
    mechanisms: tuple[str, ...]
    max_clip: float

    @staticmethod
    def of_node(node_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Guard | None:
        """The guard that the operator has set for this node, None if there is none."""
        # The environment first: a node's configuration reaches the app in an object that the app can write to.
        path = environment.get(VARIABLE) or node_config.get(NODE_KEY)
        return None if not path else Guard.load(Path(str(path)).expanduser())

    @staticmethod
    def load(path: Path | str) -> Guard:
        path = Path(path)
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"the guard file {str(path)!r} can't be read: {error.strerror}.") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"the guard file {str(path)!r} is not valid TOML: {error}.") from None
        numbers = ("max_epsilon_per_round", "max_epsilon_total", "delta", "max_clip")
        for name in (*numbers, "mechanisms"):
            require(name in values, f"the guard file {str(path)!r} has no {name}; it must state all of its limits.")
        for name in values:
            if name not in (*numbers, "mechanisms"):
                raise InputError(f"guard: {name} is not a setting.{nearest(name, (*numbers, 'mechanisms'))}")
        for name in numbers:
            value = values[name]
            good = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
            require(good, f"guard: {name} is {value!r}; it must be a positive number.")
        require(values["delta"] < 1, f"guard: delta is {values['delta']}; it must be below 1.")
        require(isinstance(values["mechanisms"], list), "guard: mechanisms must be a list of names.")
        for name in values["mechanisms"]:
            if name not in KINDS:
                raise InputError(f"guard: mechanism {name!r} does not exist.{nearest(str(name), KINDS)}")
        return Guard(path, **{**values, "mechanisms": tuple(values["mechanisms"])})

    @property
    def ledger(self) -> Path:
        return self.path.with_name(self.path.stem + ".ledger.jsonl")

    def admit(self, round: int, mechanism: Mechanism, sampling: Sampling) -> None:
        """Returns when the round is within every limit and charged on disk; raises `Refused` otherwise."""
        kind = kind_of(mechanism)
        if kind not in self.mechanisms:
            raise Refused(f"mechanism {kind!r} is not allowed here; allowed: {', '.join(self.mechanisms) or 'none'}.")
        if mechanism.clip > self.max_clip:
            raise Refused(f"clip {mechanism.clip:g} is above this node's max_clip of {self.max_clip:g}.")
        event = client_event(mechanism, sampling)
        alone = total([(event, 1)], self.delta)
        if alone > self.max_epsilon_per_round:
            raise Refused(
                f"the round costs epsilon {alone:.4g} at delta {self.delta:g}, above this node's max_epsilon_per_round of "
                f"{self.max_epsilon_per_round:g}."
            )
        with self._open() as ledger:
            after = total([*ledger.charges(), (event, 1)], self.delta)
            if after > self.max_epsilon_total:
                raise Refused(
                    f"the round would take this node's total to epsilon {after:.4g} at delta {self.delta:g}, above its "
                    f"max_epsilon_total of {self.max_epsilon_total:g}."
                )
            ledger.charge(round, event)

    @contextlib.contextmanager
    def _open(self) -> Iterator[Ledger]:
        """The node's ledger, one message at a time: two runs on one node must not both pass the same check."""
        lock = os.open(self.path.with_name(self.path.stem + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with contextlib.suppress(ImportError):
                import fcntl

                fcntl.flock(lock, fcntl.LOCK_EX)
            known = self.ledger.exists()
            with Ledger.open(self.ledger, repair=True) if known else Ledger.create(self.ledger) as book:
                yield book
        except (LedgerError, OSError) as error:
            raise Refused(f"this node's own ledger can't be used: {error}") from None
        finally:
            os.close(lock)


def client_event(mechanism: Mechanism, sampling: Sampling) -> Event:
    """What one answered round costs the client that answers it: no amplification, because it knows that it was asked."""
    if isinstance(mechanism, CentralGaussian):
        mechanism = replace(mechanism, adjacency="replace-one")
    event = mechanism.event(sampling)
    return replace(event, sampling=Sampling()) if isinstance(event, GaussianEvent) else event


def total(charges: Charges, delta: float) -> float:
    """ε of everything that a node answered. Central and local rounds promise things about different observers, so their ε are
    added, with the δ shared between them."""
    settings: dict[str, list[tuple[Event, int]]] = {}
    for event, count in charges:
        settings.setdefault(event.setting, []).append((event, count))
    return sum(compose(part, delta / len(settings)).epsilon for part in settings.values())
