"""The node operator's own limits: a file beside the node that the server and the uploaded app have no say in.

    max_epsilon_per_round = 4.0
    max_epsilon_total = 20.0
    delta = 1e-5
    mechanisms = ["local-gaussian", "privunit"]
    max_clip = 1.0
    helper_key = "…"               # with two-party aggregation: the public key of the helper that this site trusts
    apps = ["9f2c…"]             # for `dpfedexp node`: hashes of the apps that may run here
    answer_failures = false      # for `dpfedexp node`: true answers an app's failure with a charged report of zero
    id = "ward 7"                # by which guard and ledger are known; drawn and written here at the first use where it is missing

Its path comes from the node's own configuration (`--node-config 'dpfedexp-guard="…"'`) or environment (DPFEDEXP_GUARD), never from
a message. A guard file belongs to one holder of data: SuperNodes that share it are charged as one. It is known by its id: a renamed
file goes on with its ledger, and a copy without the ledger is refused.

Formal guarantee: everything that was sent under this file, to whichever runs, is within `max_epsilon_total` for the replacement of
all of the holder's data. An answer is charged before it exists, at full price, as if it had been sure to take part, and for what
the data can do to it: a node that answers for k hosted clients moves a central sum k times as far, and sends k local reports.
What was spent is kept over all runs and restarts (`guard_ledger.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dpfedexp.errors import LedgerError, checked, require
from dpfedexp.flower.messages import Request
from dpfedexp.flower.node.guard_ledger import Place, guard_ledger
from dpfedexp.flower.node.limits import read_limits
from dpfedexp.flower.node.price import Refused, node_charge, total
from dpfedexp.mechanisms.aggregation import check_public

NODE_KEY = "dpfedexp-guard"
VARIABLE = "DPFEDEXP_GUARD"
_HASH = re.compile(r"[0-9a-f]{64}")


@checked
@dataclass(frozen=True)
class Guard:
    """What one node agrees to."""

    path: Path
    max_epsilon_per_round: float
    max_epsilon_total: float
    delta: float
    mechanisms: tuple[str, ...]
    max_clip: float
    helper_key: str | None = None
    apps: tuple[str, ...] = ()
    answer_failures: bool = False

    @staticmethod
    @checked
    def of_node(node_config: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Guard | None:
        """The guard that the operator has set for this node, None if there is none."""
        # The environment first: a node's configuration reaches the app in an object that the app can write to.
        path = environment.get(VARIABLE, node_config.get(NODE_KEY))
        if path is None:
            return None
        require(
            bool(str(path).strip()), f"{VARIABLE} or {NODE_KEY} is empty; it must name the guard file, or not be set."
        )
        return Guard.load(Path(str(path)).expanduser())

    @staticmethod
    def load(path: Path | str) -> Guard:
        """The limits in a guard file; a sentence if it can't be read or does not state all of them."""
        path = Path(path)
        values = read_limits(path, "guard", optional=("helper_key", "apps", "answer_failures"))
        if "helper_key" in values:
            values["helper_key"] = check_public(values["helper_key"], "guard: helper_key")
        apps = values.get("apps", [])
        good = isinstance(apps, list) and all(isinstance(a, str) and _HASH.fullmatch(a) for a in apps)
        require(
            good,
            "guard: apps must be a list of hashes of 64 hexadecimal digits, as `dpfedexp flower hash` prints them.",
        )
        failures = values.get("answer_failures", False)
        require(isinstance(failures, bool), f"guard: answer_failures is {failures!r}; it must be true or false.")
        return Guard(path, **{**values, "apps": tuple(apps)})

    @property
    def ledger(self) -> Path:
        return Place.of(self.path).ledger

    def admit(self, request: Request, *, run: str = "", app: str = "", charge: bool = True) -> None:
        """Returns when the answer is within every limit and charged on disk; raises `Refused` otherwise.

        The limit per round is for all answers to one round of one run, whichever of the hosted clients they were asked for.

        Args:
            request: what the server asks for.
            run: Flower's id of the run.
            app: the hash of the app that trains, for the ledger's line.
            charge: False only looks whether it would be admitted.
        """
        mechanism = request.mechanism
        kind = mechanism.kind
        if kind not in self.mechanisms:
            raise Refused(f"mechanism {kind!r} is not allowed here; allowed: {', '.join(self.mechanisms) or 'none'}.")
        if mechanism.clip > self.max_clip:
            raise Refused(f"clip {mechanism.clip:g} is above this node's max_clip of {self.max_clip:g}.")
        event, count = node_charge(mechanism, request.size)
        self._check_round(total([(event, count)], self.delta))
        try:
            with guard_ledger(self.path) as ledger:
                earlier = [e.event for e in ledger.entries if (e.run, e.round) == (run, request.round)]
                event = event.beside(earlier)
                self._check_round(total([*((e, 1) for e in earlier), (event, count)], self.delta))
                self._check_total(total([*ledger.charges(), (event, count)], self.delta))
                note = {"time": datetime.now(UTC).isoformat(timespec="seconds"), "app": app}
                for _ in range(count if charge else 0):
                    ledger.charge(request.round, event, run=run, note=note)
        except (LedgerError, OSError) as error:
            raise Refused(
                f"this node's own ledger can't be used: {error}",
                shown="this node's own ledger can't be used; the node's own log says why.",
            ) from None

    def _check_round(self, epsilon: float) -> None:
        if not epsilon <= self.max_epsilon_per_round:
            raise Refused(
                f"the round costs epsilon {epsilon:.4g} at delta {self.delta:g}, above this node's max_epsilon_per_round of "
                f"{self.max_epsilon_per_round:g}."
            )

    def _check_total(self, epsilon: float) -> None:
        if not epsilon <= self.max_epsilon_total:
            raise Refused(
                f"the round would take this node's total to epsilon {epsilon:.4g} at delta {self.delta:g}, above its "
                f"max_epsilon_total of {self.max_epsilon_total:g}.",
                shown=f"the round would take this node above its max_epsilon_total of {self.max_epsilon_total:g}.",
            )
