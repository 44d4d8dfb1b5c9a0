"""Real processes on loopback with TLS and node authentication: a SuperLink, three SuperNodes, and everything that can go wrong."""

import contextlib
import copy
import http.client
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dpfedexp.accounting import Ledger
from dpfedexp.data import synthetic_regression
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.flower.access import read_nodes
from dpfedexp.flower.local_deployment import QUIET, Deployment, make_node_key, processes_of
from dpfedexp.flower.monitor import read_status
from dpfedexp.models import linear_regression
from tests.engine.small import entries
from tests.sizes import long

from .app_folder import (
    ALMOST_NO_NOISE,
    LOCAL,
    PATIENCE,
    QUICK,
    assert_first_round_is_the_simulators,
    finish,
    kill_server_app,
    make_app,
    run_in,
    start_app,
    wait_until,
)
from .loopback import counts
from .other_user import as_app_user, can_switch_user

NETWORK = "127.0.0.2"
"""An address of loopback that stands for the network: nodes connect to it, and what listens on 127.0.0.1 is not there."""
FEDERATION = {"clients": 3, "rounds": 3, "min_reply_fraction": 0.3, "round_timeout": PATIENCE, "node_timeout": PATIENCE}
GUARD = """
max_epsilon_per_round = 1e30
max_epsilon_total = 1e30
delta = 1e-5
mechanisms = ["central-gaussian", "local-gaussian"]
max_clip = 1.0
"""


@long
@pytest.mark.usefixtures("alone")
def test_three_nodes_with_tls_survive_hostile_clients_kills_and_a_resume(tmp_path):
    """One deployment for all of it, because starting one is what takes time; each step below says what it shows."""
    (tmp_path / "guard.toml").write_text(GUARD)
    guards = {node: {"dpfedexp-guard": str(tmp_path / "guard.toml")} for node in range(3)}
    with Deployment(tmp_path / "up", 3, node_config=guards, environment=QUICK, host=NETWORK) as deployment:
        key, _ = make_node_key(tmp_path, "stranger")
        stranger = deployment.start_supernode(3, key=key)
        deployment.supernodes.remove(stranger)
        no_core_is_dumped(deployment)
        over = threading.Event()
        with ThreadPoolExecutor(2) as pool:
            peers = pool.submit(peers_of, deployment, over)
            closed = pool.submit(control_is_closed_to_nodes, deployment, tmp_path)
            try:
                central_run_whose_server_and_nodes_are_killed(deployment, tmp_path)
            finally:
                over.set()
            closed.result()
        unregistered_node_was_refused(deployment, stranger)
        nodes_kept_their_own_ledger_over_runs_and_restarts(tmp_path)
        no_connection_left_the_machine(deployment, peers.result())
        no_update_is_on_disk(tmp_path)
    no_update_is_on_disk(tmp_path)
    assert processes_of(deployment.mark) == [], "nothing may be left running"


def peers_of(deployment: Deployment, over: threading.Event) -> set[str]:
    """All TCP peers of all processes meanwhile, looked at twice a second."""
    peers: set[str] = set()
    while not over.wait(0.5):
        for pid in processes_of(deployment.mark):
            with contextlib.suppress(OSError):
                peers.update(_peers(pid))
    return peers


def control_is_closed_to_nodes(deployment: Deployment, place: Path) -> None:
    """The attack: with a node's address of the SuperLink, its certificate and its key, register a key and run an app everywhere."""
    home = place / "attacker"
    home.mkdir()
    where = f'address = "{NETWORK}:{deployment.port}"\nroot-certificates = "{deployment.certificates.authority}"\n'
    (home / "config.toml").write_text(f'[superlink]\ndefault = "theirs"\n\n[superlink.theirs]\n{where}')
    _, public = make_node_key(home, "own")
    app = make_app(home / "app")
    for command in (["supernode", "register", str(public)], ["supernode", "list"], ["run", str(app)], ["list"]):
        done = run_in(home, {**deployment.environment, "FLWR_HOME": str(home)}, "flwr", *command, "theirs")
        assert done.returncode != 0, (command, done.stdout)
        assert "Successfully" not in done.stdout
    # The first is reached, and not content with an empty request; `test_superlink.py` tries all other paths.
    paths = {"/v1/fleet/activate-node": 415, "/v1/control/start-run": 404, "/v1/fleet/%2e%2e/control/start-run": 404}
    trust = ssl.create_default_context(cafile=str(deployment.certificates.authority))
    for path, expected in paths.items():
        connection = http.client.HTTPSConnection(NETWORK, deployment.port, context=trust, timeout=PATIENCE)
        connection.request("POST", path, b"", {"Content-Type": "application/x-protobuf"})
        status = connection.getresponse().status
        assert status == expected, path
    with socket.socket() as probe:
        assert probe.connect_ex((NETWORK, deployment.control_port)) != 0, "Control must be on 127.0.0.1 alone"
    if can_switch_user():
        asked = f"import socket, ssl; s = socket.create_connection(('127.0.0.1', {deployment.control_port})); "
        asked += (
            "c = ssl._create_unverified_context().wrap_socket(s); c.sendall(b'POST /v1/control/list-runs HTTP/1.1\\r\\n"
        )
        asked += "Host: x\\r\\nContent-Length: 0\\r\\n\\r\\n'); print(c.recv(15))"
        other = run_in(Path("/"), dict(os.environ), *as_app_user([sys.executable, "-c", asked]))
        assert "HTTP/1.1 404" in other.stdout, "another user of the server's machine has no more rights than a node"


def no_update_is_on_disk(place: Path) -> None:
    """No file of the deployment holds what a node sent: not the update itself, nor four numbers of it in a row."""
    clients, model = synthetic_regression(3, 20).federation, linear_regression(20)
    for client in range(3):
        net = copy.deepcopy(model)
        inputs, targets = clients.client(client)
        descent = torch.optim.SGD(net.parameters(), lr=LOCAL["lr"])
        for _ in range(LOCAL["steps"]):
            descent.zero_grad()
            (0.5 * (net(inputs) - targets).square().mean()).backward()
            descent.step()
        update = torch.cat([p.detach().flatten() for p in net.parameters()])
        clipped = (update * min(1.0, 0.5 / float(update.norm()))).numpy()
        pieces = [clipped[i : i + 4].astype(kind).tobytes() for i in range(0, 20, 4) for kind in ("<f4", "<f8")]
        for path in place.rglob("*"):
            if path.is_file():
                content = path.read_bytes()
                assert not any(piece in content for piece in pieces), path
    modes = {path: path.stat().st_mode & 0o077 for path in (place / "up").glob("node?")}
    assert modes
    assert set(modes.values()) == {0}
    assert (place / "up").stat().st_mode & 0o077 == 0


def no_core_is_dumped(deployment: Deployment) -> None:
    """A SuperLink that crashes leaves no copy of its memory; what it starts inherits that."""
    limits = Path(f"/proc/{deployment.superlink.pid}/limits").read_text().splitlines()
    assert next(line for line in limits if "core" in line).split()[4:6] == ["0", "0"]


def central_run_whose_server_and_nodes_are_killed(deployment: Deployment, place: Path) -> None:
    """The SuperLink dies after round 1 and the run is resumed. In round 2 one node fails and one sends NaN; in round 3 one node
    hangs and another is killed."""
    out = place / "cdp"
    app = make_app(
        place / "cdp-app",
        hostile=True,
        federation={**FEDERATION, "budget": None, "folder": "../cdp", "nodes": str(deployment.node_list)},
        algorithm={"name": "cdp_fedexp", "target_epsilon": None, "noise_multiplier": ALMOST_NO_NOISE},
        local=LOCAL,
        test={"plan": "1:2=nan 2:2=crash 1:3=hang 2:3=die", "marks": str(place)},
    )
    first = start_app(app, deployment.environment)
    wait_until(lambda: (out / "status.json").exists() and read_status(out)["round"] == 1, "round 1")
    assert read_status(out)["status"] == "running"
    assert json.loads((out / "privacy.json").read_text())["rounds"] == 1, "there is a statement after every round"
    model_after_one = load_file(out / "checkpoint.safetensors")["w"]
    kill_server_app(deployment)
    assert "killed: 1 of 3 rounds" in finish(first, app)
    assert (first.returncode, read_status(out)["status"]) == (4, "killed")
    deployment.superlink.kill()
    deployment.superlink.wait()
    assert [entry.round for entry in entries(out)] == [1]
    deployment.start_superlink()

    second = start_app(app, deployment.environment, "-c", "federation.round_timeout=120.0")
    wait_until(lambda: (place / "die").exists() and (place / "hang").exists(), "round 3")
    os.killpg(deployment.supernodes[2].pid, signal.SIGKILL)
    log = finish(second, app)

    progress = read_progress(out)
    assert progress.round == 3, log
    assert (second.returncode, read_status(out)["status"]) == (0, "completed")
    assert progress.settings["nodes"] == list(read_nodes(deployment.node_list)), "ids of the keys, after a restart"
    assert [counts(line) for line in progress.history] == [(3, 3, 0, 0), (3, 1, 2, 0), (3, 1, 0, 2)]
    assert [entry.round for entry in entries(out)] == [1, 2, 3]
    assert "Resuming after round 1 of 3" in log
    assert "not finite" in log
    assert "the app's train function failed; see the node's log" in log
    # The text of the exception names a value of the node's own: it is in that node's log and nowhere else.
    assert "client is 47110815" in (deployment.folder / "supernode2.log").read_text()
    assert not any("47110815" in path.read_text() for path in (app / "run.log", deployment.folder / "superlink.log"))
    statement = json.loads((out / "privacy.json").read_text())
    assert statement["rounds"] == 3
    assert progress.history[-1]["epsilon_total"] == statement["epsilon_total"]
    assert_first_round_is_the_simulators(model_after_one)


def nodes_kept_their_own_ledger_over_runs_and_restarts(place: Path) -> None:
    """The central rounds, those asked twice included."""
    charged = [Ledger.open(place / f"guard.node{i}.ledger.jsonl", read_only=True) for i in range(3)]
    # Three answers in round 1, none to three in the round that was killed, three in round 2, one in round 3.
    assert 7 <= sum(len(book) for book in charged) <= 10


def unregistered_node_was_refused(deployment: Deployment, stranger: subprocess.Popen) -> None:
    """A fourth SuperNode with a key that was not registered ended at once, and took part in nothing (3 were asked above)."""
    try:
        assert stranger.wait(60) != 0
    finally:
        stranger.kill()
        stranger.wait()
    log = (deployment.folder / "supernode3.log").read_text()
    assert "SuperNode ID" not in log
    assert "ROUND" not in log


def no_connection_left_the_machine(deployment: Deployment, peers: set[str]) -> None:
    assert "127.0.0.1" in peers, "the processes must have connections for this to mean anything"
    assert peers <= {"127.0.0.1", NETWORK, "::1", "::ffff:127.0.0.1"}
    assert all(deployment.environment[name] == value for name, value in QUIET.items())


def _peers(pid: int) -> set[str]:
    """Remote addresses of a process's TCP connections, those it is still trying to make included, from /proc."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = os.readlink(fd)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    peers = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] not in inodes or fields[3] == "0A":
                continue
            raw = bytes.fromhex(fields[2].split(":")[0])
            ordered = b"".join(raw[i : i + 4][::-1] for i in range(0, len(raw), 4))
            peers.add(str(ipaddress.ip_address(ordered)))
    return peers
