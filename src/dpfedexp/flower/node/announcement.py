"""What a run announced when a node joined it: the limits of a node whose operator has set no guard.

A run announces itself by its configuration (`context.run_config`), which Flower fixes when the run is created, if it has the
sections of `sections.py`. Otherwise its first request is the announcement. Later requests may not be of another kind of mechanism,
not cost more, not clip at a larger radius (unless the clip is adaptive, which only a trusted server has), not ask for more hosted
clients, and not be more than the announced number of rounds. There is no allowance for rounds that failed: a repeated round costs
again, and a resumed run is a new run of Flower, which announces itself again.

Updates without clip and noise (mechanism "none") leave the node only if the configuration itself announces an algorithm without
privacy; a request can't announce that.

What was announced and the number of answers are kept in `context.state`, in the SuperNode's memory: they bind one run. Flower 1.41
works on several messages at once if a server sends them at once, each with the state from before them, so such answers are counted
once; what each may cost is still limited. Limits over all runs, restarts and simultaneous messages need a guard file.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from flwr.app import ConfigRecord, Context

from dpfedexp.errors import InputError
from dpfedexp.flower.messages import Request
from dpfedexp.flower.node.price import Refused, node_charge, total
from dpfedexp.flower.noise import bind, deployed
from dpfedexp.flower.sections import read_settings
from dpfedexp.mechanisms import Mechanism
from dpfedexp.mechanisms.text import decode, encode

_log = logging.getLogger("flwr")

_RECORD = "dpfedexp.announcement"
_DELTA = 1e-5
"""At which ε is shown; costs are compared by μ, or by the pure ε of a PrivUnit report."""
_ROUNDING = 1 + 1e-6
"""Two machines that calibrate the same noise may differ by rounding."""
_SEARCH = 1 + 1e-4
"""The best split of PrivUnit's ε is searched for, and found to about 1e-6 of it."""


@dataclass(frozen=True)
class Announcement:
    """The mechanism of every round (but for an adaptive clip), how many rounds there are, and clients per node."""

    mechanism: Mechanism
    rounds: int
    hosted: int

    @staticmethod
    def of_run(run_config: Mapping[str, Any], dimension: int) -> Announcement | None:
        """What the configuration announces for a model of so many parameters; None if it is not one of this library's."""
        return _of_run(tuple(run_config.items()), dimension)

    @staticmethod
    def of_request(request: Request) -> Announcement:
        if not request.mechanism.is_private:
            raise Refused(
                "mechanism 'none' sends updates as they are, and the run's configuration announces no algorithm without privacy "
                "(algorithm.name 'fedavg' or 'fedexp'); announce one, or list 'none' in this node's guard file."
            )
        return Announcement(request.mechanism, request.rounds, request.hosted)

    def check(self, request: Request) -> None:
        """Raises `Refused` if the request asks for more than this."""
        kind, announced_kind = request.mechanism.kind, self.mechanism.kind
        if kind != announced_kind:
            raise Refused(f"mechanism {kind!r} is not the one that this run announced, {announced_kind!r}.")
        if request.size > self.hosted:
            raise Refused(f"the request is for {request.size} hosted clients, and this run announced {self.hosted}.")
        event, announced = request.mechanism.client_event(), self.mechanism.client_event()
        if not event.strength <= announced.strength * _ROUNDING:
            cost, limit = (total([(e, 1)], _DELTA) for e in (event, announced))
            raise Refused(
                f"the round costs epsilon {cost:.4g} at delta {_DELTA:g}, above the {limit:.4g} that this run announced."
            )
        if not event.tells_no_more_than(announced, _SEARCH):
            raise Refused(
                "the parts of the report's epsilon are not those that this run announced, and compose to more."
            )
        clip, most = request.mechanism.clip, self.mechanism.clip
        if not (self.mechanism.adapts_clip or clip <= most * _ROUNDING):
            raise Refused(f"clip {clip:g} is above the {most:g} that this run announced.")


# Calibrating the noise of a sampled round takes seconds, and in Flower's simulation one process is many nodes.
@lru_cache(maxsize=16)
def _of_run(run_config: tuple[tuple[str, Any], ...], dimension: int) -> Announcement | None:
    try:
        federation, settings = read_settings(dict(run_config))
        algorithm, participation = settings.build_algorithm(), settings.build_participation()
        mechanism = bind(algorithm, participation, dimension, federation.clients, federation.rounds)
    except InputError:
        return None
    return Announcement(mechanism, federation.rounds, federation.clients_per_node)


def admit_announced(request: Request, context: Context, dimension: int) -> None:
    """Returns when the request is within what its run announced, and counts the answer; raises `Refused` otherwise."""
    # By run: Flower hands the state of one run to the next of the same series.
    name = f"{_RECORD}.{context.run_id}"
    record = context.state.config_records.get(name)
    if record is None:
        announcement = Announcement.of_run(context.run_config, dimension) or Announcement.of_request(request)
        answers = 0
    else:
        announcement = Announcement(
            deployed(decode(str(record["mechanism"]))),
            int(record["rounds"]),  # type: ignore[arg-type]
            int(record["hosted"]),  # type: ignore[arg-type]
        )
        answers = int(record["answers"])  # type: ignore[arg-type]
    announcement.check(request)
    if answers >= announcement.rounds:
        raise Refused(
            f"this node has answered {answers} times, as often as this run announced rounds; a repeated round costs again."
        )
    if record is None:
        _tell(announcement)
    context.state[name] = ConfigRecord(
        {
            "mechanism": encode(announcement.mechanism),
            "rounds": announcement.rounds,
            "hosted": announcement.hosted,
            "answers": answers + 1,
        }
    )


def _tell(announcement: Announcement) -> None:
    event, count = node_charge(announcement.mechanism, announcement.hosted)
    _log.info(
        "This node has no guard file and joins a run of %d rounds with mechanism %r: epsilon %.4g a round at delta %g",
        announcement.rounds,
        announcement.mechanism.kind,
        total([(event, count)], _DELTA),
        _DELTA,
    )
