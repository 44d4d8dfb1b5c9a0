"""The SuperLink's state, in memory: nothing that a node sends is ever written to disk, and ids follow from keys."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.server.superlink.linkstate.in_memory_linkstate import InMemoryLinkState
from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import FederationManager

from dpfedexp.flower.identity import node_id

_HEARTBEAT = 30.0


class KeyedLinkState(InMemoryLinkState):
    """Flower's state in memory, where a node's id follows from its key."""

    def create_node(self, owner_aid: str, owner_name: str, public_key: bytes, *rest: Any, **named: Any) -> int:
        with self.lock:
            drawn = super().create_node(owner_aid, owner_name, public_key, *rest, **named)
            if not drawn:
                return drawn
            own = node_id(public_key)
            if own in self.nodes:
                raise ValueError("another key has this node's id")
            info = self.nodes.pop(drawn)
            info.node_id = own
            self.nodes[own] = info
            self.node_public_key_to_node_id[public_key] = own
            self.owner_to_node_ids[owner_aid] -= {drawn}
            self.owner_to_node_ids[owner_aid] |= {own}
            return own


def memory_factories(manager: FederationManager, keys: Iterable[bytes]) -> tuple[ObjectStoreFactory, LinkStateFactory]:
    """What Flower makes its state with: in memory, and knowing these nodes' keys from the start."""
    objects = ObjectStoreFactory(FLWR_IN_MEMORY_DB_NAME)
    factory = LinkStateFactory(FLWR_IN_MEMORY_DB_NAME, manager, objects)
    state = KeyedLinkState(manager, objects.store())
    for key in keys:
        state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, _HEARTBEAT)
    factory.state_instance = state
    return objects, factory
