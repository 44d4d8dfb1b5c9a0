"""The helper operator's own file: its key, its limits, and the ledger beside it.

    private_key = "helper.key"           # beside the file, or a whole path; `dpfedexp flower helper-key` writes it
    min_clients = 10
    max_epsilon_per_round = 4.0
    max_epsilon_total = 20.0
    delta = 1e-5
    mechanisms = ["two-party"]
    max_clip = 1.0
    max_columns = 100_000_000            # the longest row, in numbers of 8 bytes; this is what holds where it is not said

Its path comes from the node's own environment (DPFEDEXP_HELPER) or configuration (`--node-config 'dpfedexp-helper="…"'`), never
from a message. The ledger is kept like a guard's (`node/guard_ledger.py`): a copy that was put back from a back-up is refused, and
so is the file without its ledger. `dpfedexp guard show` shows what was spent.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfedexp.core.noise import Noise
from dpfedexp.errors import LedgerError, is_count, require
from dpfedexp.flower.node.guard_ledger import Place, guard_ledger
from dpfedexp.flower.node.limits import read_limits
from dpfedexp.flower.node.price import Refused, total
from dpfedexp.flower.noise import deployment_noise
from dpfedexp.mechanisms.aggregation import FEWEST, Helper, PrivateKey, Round
from dpfedexp.mechanisms.two_party import TwoPartyGaussian

NODE_KEY, VARIABLE = "dpfedexp-helper", "DPFEDEXP_HELPER"


@dataclass(frozen=True)
class HelperFile:
    """What one helper agrees to.

    Formal guarantee: all answers under this file together are within `max_epsilon_total` for every client, whichever runs asked and
    whichever of them the client was in.
    """

    path: Path
    private_key: Path
    min_clients: int
    max_epsilon_per_round: float
    max_epsilon_total: float
    delta: float
    mechanisms: tuple[str, ...]
    max_clip: float
    max_columns: int = 100_000_000

    @staticmethod
    def of_node(node_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> HelperFile | None:
        """The file of a node that is a helper, None on any other node."""
        path = environment.get(VARIABLE, node_config.get(NODE_KEY))
        return None if path is None else HelperFile.load(Path(str(path)).expanduser())

    @staticmethod
    def load(path: Path | str) -> HelperFile:
        """The limits in a helper's file; a sentence if it can't be read or does not state all of them."""
        path = Path(path)
        values = read_limits(path, "helper", ("private_key", "min_clients"), ("max_columns",))
        fewest = values["min_clients"]
        require(
            is_count(fewest) and fewest >= FEWEST,
            f"helper: min_clients is {fewest!r}; it must be a whole number of at least {FEWEST}.",
        )
        longest = values.get("max_columns", 1)
        require(is_count(longest), f"helper: max_columns is {longest!r}; it must be a positive whole number.")
        require(isinstance(values["private_key"], str), "helper: private_key must be the name of a file.")
        key = path.parent / Path(values["private_key"]).expanduser()
        return HelperFile(path, **{**values, "private_key": key})

    @property
    def ledger(self) -> Path:
        return Place.of(self.path).ledger

    def helper(self, noise: Callable[[], Noise] = deployment_noise) -> Helper:
        """The helper with this file's key, limits and ledger."""
        return Helper(PrivateKey.load(self.private_key), self.min_clients, self.admit, noise)

    def admit(self, round_: Round, mechanism: TwoPartyGaussian) -> None:
        """Returns when the answer is the first to its round and nonce, within every limit, and charged on disk."""
        kind = mechanism.kind
        require(
            kind in self.mechanisms, f"mechanism {kind!r} is not allowed here; allowed: {', '.join(self.mechanisms)}."
        )
        require(
            mechanism.clip <= self.max_clip,
            f"clip {mechanism.clip:g} is above this helper's max_clip of {self.max_clip:g}.",
        )
        require(
            round_.columns <= self.max_columns,
            f"a row has {round_.columns} numbers, above this helper's max_columns of {self.max_columns}.",
        )
        # For a client that is in every set: the helper sees who takes part, so sampling hides nobody.
        event = mechanism.client_event()
        epsilon = total([(event, 1)], self.delta)
        require(
            epsilon <= self.max_epsilon_per_round,
            f"the round costs epsilon {epsilon:.4g} at delta {self.delta:g}, above this helper's max_epsilon_per_round of "
            f"{self.max_epsilon_per_round:g}.",
        )
        try:
            with guard_ledger(self.path) as ledger:
                answered = [entry.round for entry in ledger.entries if entry.run == round_.run]
                require(
                    all(number < round_.number for number in answered),
                    f"round {round_.number} comes after an answer to round {max(answered, default=0)} of the same run: every round "
                    "is answered once, for one set of clients, and rounds go up.",
                )
                require(
                    all(entry.noise != round_.nonce for entry in ledger.entries),
                    "the nonce was answered before; every round has a nonce of its own.",
                )
                require(
                    total([*ledger.charges(), (event, 1)], self.delta) <= self.max_epsilon_total,
                    f"the round would take this helper above its max_epsilon_total of {self.max_epsilon_total:g}.",
                )
                note = {"time": datetime.now(UTC).isoformat(timespec="seconds")}
                ledger.charge(round_.number, event, run=round_.run, noise=round_.nonce, note=note)
        except (LedgerError, OSError) as error:
            raise Refused(
                f"this helper's own ledger can't be used: {error}",
                shown="this helper's own ledger can't be used; its own log says why.",
            ) from None
