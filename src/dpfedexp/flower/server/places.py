"""Who may be asked in a round: the places of a run, who took them, and how many nodes a round waits for."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

from flwr.serverapp import Grid

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
    """

    count: int
    floor: float
    timeout: float
    open_to_all: bool = False
    rebind: bool = False
    taken: tuple[int, ...] = ()
    _begun: bool = False

    def nodes_of_round(self, grid: Grid) -> list[int]:
        """Who can be asked: all that are connected where the run is open, otherwise those with a place that are connected.

        One that is absent is a reply that is missing.
        """
        if self.open_to_all:
            return wait_for_nodes(grid, *self._wanted(), self.timeout, secret=True)
        rebind = self.rebind and not self._begun

        def places(connected: Sequence[int]) -> tuple[int, ...]:
            kept = tuple(node for node in self.taken if node in connected) if rebind else self.taken
            return seated(connected, kept, self.count)

        def present(connected: Sequence[int]) -> list[int]:
            having = places(connected)
            return [node for node in connected if node in having]

        here = wait_for_nodes(grid, *self._wanted(), self.timeout, taking_part=present)
        before, self.taken = self.taken, places(here)
        new = len(set(self.taken) - set(before))
        if before and new:
            _log.warning("%d nodes that were not in this run before took free places in it", new)
        return here

    def _wanted(self) -> tuple[int, int]:
        """Nodes to wait for, and how many will do. Only the first round waits for all: a node that is gone is not waited for."""
        enough = max(1, math.ceil(self.floor * self.count))
        wanted = enough if self._begun else self.count
        self._begun = True
        return wanted, enough
