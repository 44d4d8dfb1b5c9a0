"""The SuperLink that is closed by default: who a node is, what can be reached from where, and what its options refuse."""

from __future__ import annotations

import asyncio
import os
import socket

import pytest
from flwr.common.constant import NOOP_FLWR_AID
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.routers.fleet.router import router as fleet_router

from dpfedexp.errors import InputError
from dpfedexp.flower.access import node_id, parse_address, read_keys, read_nodes
from dpfedexp.flower.local import make_node_key
from dpfedexp.flower.superlink import FLEET, Only, is_fleet, is_own_user, memory_factories, serve


@pytest.fixture
def keys(tmp_path):
    """A list of three nodes."""
    public = [make_node_key(tmp_path, f"node{i}")[1] for i in range(3)]
    path = tmp_path / "nodes.pub"
    path.write_text("# hospitals\n\n" + "".join(p.read_text() for p in public))
    return path


def test_ids_follow_from_keys_over_restarts_and_are_those_of_the_list(keys):
    states = [memory_factories(NoOpFederationManager(), read_keys(keys))[1].state() for _ in range(2)]
    for state in states:
        assert sorted(state.nodes) == list(read_nodes(keys))
        for key in read_keys(keys):
            assert state.get_node_id_by_public_key(key) == node_id(key)
            assert state.activate_node(node_id(key), 30.0)
        assert sorted(info.node_id for info in state.nodes.values()) == sorted(state.nodes)
        assert state.owner_to_node_ids[NOOP_FLWR_AID] == set(state.nodes)
        with pytest.raises(ValueError, match="already in use"):
            state.create_node(NOOP_FLWR_AID, "none", read_keys(keys)[0], 30.0)
    assert len(set(read_nodes(keys))) == 3


def test_a_list_of_nodes_that_is_none_is_a_sentence(keys, tmp_path):
    first = keys.read_text().splitlines()[2]
    for text, reason in (
        ("", "names no node"),
        (f"{first}\n{first}\n", "names a node twice"),
        ("ssh-rsa AAAA\n", "line 1: not a public key of a node"),
        (f"{first}\nhospital\n", "line 2: not a public key of a node"),
    ):
        keys.write_text(text)
        with pytest.raises(InputError, match=reason):
            read_nodes(keys)
    with pytest.raises(InputError, match="can't be read"):
        read_nodes(tmp_path / "missing")


def ask(application, path, method="POST", kind="http", **scope):
    """The status that a request gets; what reached the application gets 200."""
    said = []

    async def send(event):
        said.append(event)

    async def receive():
        return {"type": "http.request"}

    asyncio.run(application({"type": kind, "method": method, "path": path, **scope}, receive, send))
    return said[0].get("status", said[0].get("code"))


async def everything(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})


def test_the_nodes_end_serves_flowers_fleet_paths_and_nothing_else():
    outer = Only(everything, is_fleet)
    assert {route.path for route in fleet_router.routes} == FLEET
    for path in FLEET:
        assert ask(outer, path) == 200
        assert ask(outer, path, method="GET") == 404
        assert ask(outer, path + "/") == 404
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/v1/fleet/../control/start-run", "/docs", "/"):
        assert ask(outer, path) == 404
    assert ask(outer, "/v1/fleet/pull-messages", kind="websocket") == 1000


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="only Linux tells whose a connection is")
def test_a_loopback_connection_is_known_by_its_user(monkeypatch):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with socket.create_connection(server.getsockname()) as client:
            scope = {"client": client.getsockname(), "server": client.getpeername()}
            assert is_own_user(scope)
            monkeypatch.setattr("os.geteuid", lambda: 12345)
            assert is_own_user(scope) == (os.getuid() == 0)
            assert not is_own_user({"client": ("127.0.0.1", 1), "server": client.getpeername()})
            assert not is_own_user({"client": None, "server": None})
            monkeypatch.undo()
            client.shutdown(socket.SHUT_RDWR)
        assert not is_own_user(scope), "the kernel lists a socket that was closed as root's, whoever opened it"


def test_what_would_open_it_is_refused(keys):
    given = {"control_port": 1, "nodes": keys, "insecure": False}
    for options, reason in (
        (["--host", "0.0.0.0"], "--host is not an option"),
        (["--database=x"], "the state is in memory"),
        (["--datab", "x"], "the state is in memory"),
        (["--ho=0.0.0.0"], "--ho is not an option"),
    ):
        with pytest.raises(InputError, match=reason):
            serve(options, fleet="0.0.0.0:9092", **given)
    with pytest.raises(InputError, match="without TLS it must be on loopback"):
        serve([], fleet="0.0.0.0:9092", **{**given, "insecure": True})
    with pytest.raises(InputError, match="nodes is missing"):
        serve([], fleet="0.0.0.0:9092", **{**given, "nodes": None})
    for wrong in ("9092", "example.org:9092", "1.2.3.4:", "1.2.3.4:99999"):
        with pytest.raises(InputError, match="it must be an IP address and a port"):
            parse_address(wrong, "fleet")
    assert parse_address("[::1]:5", "fleet") == ("::1", 5)


def test_another_version_of_flower_is_refused_before_anything_is_served(keys, monkeypatch):
    """The SuperLink stands on private functions as the node does."""
    given = {"fleet": "127.0.0.1:9092", "control_port": 1, "nodes": keys, "insecure": False}
    monkeypatch.setattr("flwr.__version__", "1.42.0")
    with pytest.raises(
        InputError, match=r"superlink was made for flwr 1\.41\.0, and this is 1\.42\.0; install flwr==1\.41\.0"
    ):
        serve([], **given)
    monkeypatch.undo()
    monkeypatch.setattr("flwr.superlink.main.create_app", lambda settings: None)
    with pytest.raises(InputError, match=r"whose flwr\.superlink\.main\.create_app is another one"):
        serve([], **given)
