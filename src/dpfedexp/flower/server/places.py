"""Who may be asked in a round: the places of a run, who took them, and how many nodes a round waits for."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.serverapp import Grid

from dpfedexp.errors import require
from dpfedexp.flower.server.nodes import seated, wait_for_nodes

_log = logging.getLogger("flwr")


@dataclass
class Places:
    """The places of a run.

    Formal guarantee: a node that comes changes nothing but its own contribution. Under add-remove adjacency every connected node
    may be asked; otherwise there is a fixed number of places, and a place belongs to the node that took it first.

    Attributes:
        count: how many nodes the run has, a public number.
        floor: the fraction of them that must be there for a round to begin.
        timeout: seconds to wait for them.
        open_to_all: whether every connected node takes part, as under add-remove adjacency.
        rebind: whether the places of nodes that are gone are free when the run goes on.
        taken: the nodes that have a place, in the order in which they took them.
        allowed: the only nodes that may be asked, sorted; None where any node that is connected may.
    """

    count: int
    floor: float
    timeout: float
    open_to_all: bool = False
    rebind: bool = False
    taken: tuple[int, ...] = ()
    allowed: tuple[int, ...] | None = None
    _begun: bool = False

    def allow(self, nodes: tuple[int, ...]) -> None:
        """Gives the run's places to these nodes and no others."""
        require(
            len(nodes) == self.count,
            f"the list of nodes names {len(nodes)}, and the run has {self.count} (clients divided by clients_per_node).",
        )
        require(not self.rebind, "rebind is true beside a list of nodes, which says who takes part; change the list.")
        self.allowed = nodes

    def nodes_of_round(self, grid: Grid) -> list[int]:
        """Who can be asked: all that are connected where the run is open, otherwise those with a place that are connected.

        One that is absent is a reply that is missing.
        """
        if self.open_to_all:
            return wait_for_nodes(grid, *self._wanted(), self.timeout, taking_part=self._listed, secret=True)
        if self.allowed is not None:
            self.taken = self.allowed
        rebind = self.rebind and not self._begun

        def places(connected: Sequence[int]) -> tuple[int, ...]:
            kept = tuple(node for node in self.taken if node in connected) if rebind else self.taken
            return seated(connected, kept, self.count)

        def present(connected: Sequence[int]) -> list[int]:
            having = places(connected)
            return [node for node in connected if node in having]

        here = wait_for_nodes(grid, *self._wanted(), self.timeout, taking_part=present)
        before, self.taken = self.taken, places(here)
        left_out = [node for node in grid.get_node_ids() if node not in self.taken]
        if left_out and not before and self.allowed is None:
            _log.warning(
                "%d nodes are connected that have no place in this run; name those that shall have one in federation.nodes",
                len(left_out),
            )
        new = len(set(self.taken) - set(before))
        if before and new:
            _log.warning("%d nodes that were not in this run before took free places in it", new)
        return here

    def _listed(self, connected: Sequence[int]) -> list[int]:
        return [node for node in connected if self.allowed is None or node in self.allowed]

    def _wanted(self) -> tuple[int, int]:
        """Nodes to wait for, and how many will do. Only the first round waits for all: a node that is gone is not waited for."""
        enough = max(1, math.ceil(self.floor * self.count))
        wanted = enough if self._begun else self.count
        self._begun = True
        return wanted, enough
