"""What a deployment promises: the statement over what was charged, with what it leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dpfedexp.accounting import Ledger, PrivacyStatement, Sampling
from dpfedexp.algorithms import Algorithm
from dpfedexp.mechanisms import Mechanism

TRUSTED_NODES = "the clients that share a node, against whoever runs that node: it adds their reports before it answers"
WHETHER_IT_FAILED = "that a round did or did not fail because too few of the clients that were drawn for it answered"
PLACES = "a run has a fixed number of places and shows how many clients answer, so a client that leaves changes more than its part"
WHO_ANSWERS = "whether and when a client answers, which the server and the network can see"


def no_other_adjacency(algorithm: Algorithm) -> str:
    """Why there is no figure for the other adjacency; empty where there is one."""
    return "" if algorithm.adjacency == "add-remove" else PLACES


def reporting(history: Iterable[Mapping[str, Any]], floor: float, clients: int) -> int:
    """How many clients reported in every round at least: by the floor, and by what came where a round had another floor.

    A run may be resumed with another floor. Counts are in the history where they are public, and so in every local run.
    """
    counts: list[int] = [line["valid"] for line in history if "valid" in line]
    return min([math.ceil(floor * clients), *counts])


def statement_of(
    ledger: Ledger,
    algorithm: Algorithm,
    mechanism: Mechanism,
    sampling: Sampling,
    *,
    clients: int,
    clients_per_node: int,
    rounds_left: int,
    rounds: int,
    reporting: int,
) -> PrivacyStatement:
    """What was promised to whom, from what was charged.

    Args:
        ledger: of the run.
        algorithm: of the run.
        mechanism: of its first round.
        sampling: who takes part in a round.
        clients: how many there are.
        clients_per_node: how many of them share a node.
        rounds_left: how many rounds are still to come.
        rounds: how many rounds the noise is meant for.
        reporting: how many clients reported in every round at least.
    """
    left_out = [WHO_ANSWERS]
    if clients_per_node > 1:
        left_out.append(TRUSTED_NODES)
    if not mechanism.counts_are_public(sampling):
        left_out.append(WHETHER_IT_FAILED)
    return PrivacyStatement.from_charges(
        ledger.charges(),
        algorithm.delta,
        algorithm=algorithm.name,
        clients=clients,
        simulated=False,
        planned=[(mechanism.event(sampling), rounds)] if rounds_left else None,
        not_covered=left_out,
        reporting=reporting,
        no_other_adjacency=no_other_adjacency(algorithm),
    )
