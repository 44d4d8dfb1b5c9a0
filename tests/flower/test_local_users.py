"""What another user of a site's machine can reach, with real processes of three users: the site's, the apps' and a stranger."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpfedexp.flower.access import core_dumpers, peer
from dpfedexp.flower.app import app_hash, program
from dpfedexp.flower.local import free_port
from dpfedexp.flower.site import ACQUIRE, serve_runtime
from tests.sizes import long

from .apart import Apart
from .app_folder import LOCAL, PATIENCE, make_app
from .other_user import NOBODY, STRANGER, as_user, can_be_nobody
from .test_isolation import GUARD, run

as_others = pytest.mark.skipif(not can_be_nobody(), reason="only root on Linux can start processes as other users")

ATTACK = """
import json, sys, time
from pathlib import Path
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.retry import make_simple_http_retry_invoker
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input

authority, out, stop, *addresses = sys.argv[1:]
tried, got = {}, []

def ask(address, token):
    given = [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")]
    given += [RuntimeTokenHttpInterceptor(token)] if token else []
    retry = make_simple_http_retry_invoker()
    retry.max_tries, retry.should_giveup = 1, None
    client = RuntimeHttpClient.from_server_address(
        server_address=address, insecure=False, root_certificates=Path(authority).read_bytes(),
        interceptors=given, retry_invoker=retry)
    try:
        what = pull_task_input(client) if token else client.AcquireTask(AcquireTaskRequest(supported_task_types=["flwr-clientapp"]))
        got.append([address, token, repr(what)[:200]])
    except Exception as error:
        tried.setdefault(address, []).append([token, str(getattr(getattr(error, "response", None), "status_code", error))])

for address in addresses:
    ask(address, None)
seen = set()
while not Path(stop).exists():
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\\0")
        except OSError:
            continue
        for before, token in zip(words, words[1:]):
            if before == b"--token" and token not in seen:
                seen.add(token)
                mine = [a for a in addresses if a.encode() in words]
                for address in mine:
                    ask(address, token.decode())
Path(out).write_text(json.dumps({"got": got, "tried": tried}))
"""
RECORD = """

def record(context):
    import ctypes, json, os, resource
    from pathlib import Path
    found = {"user": os.getuid(), "core": resource.getrlimit(resource.RLIMIT_CORE), "dumpable": ctypes.CDLL(None).prctl(3)}
    found["words"] = Path("/proc/self/cmdline").read_bytes().decode()
    node = context.node_config["partition-id"]
    Path(context.run_config["test.found"], f"node{node}.json").write_text(json.dumps(found))
"""


class OneOfEach(Apart):
    """Node 0 has Flower's own SuperExec, without cores; node 1 has `dpfedexp superexec`."""

    def superexec(self, name: str) -> list[str]:
        flowers = ["sh", "-c", 'ulimit -c 0; exec "$@"', "sh", sys.executable, program("flower-superexec")]
        return flowers if name == "supernode0" else super().superexec(name)


@long
@as_others
@pytest.mark.usefixtures("alone")
def test_a_stranger_gets_no_task_with_or_without_a_token_and_the_site_answers():
    """What was shown: the token is in a world-readable command line; with it one gets model and app, and the site is silent."""
    place = Path(tempfile.mkdtemp(prefix="dpfedexp-test-"))
    place.chmod(0o755)
    try:
        attack(place)
    finally:
        shutil.rmtree(place)


def attack(place: Path) -> None:
    shared = place / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    app = make_app(
        place / "app",
        federation={"clients": 2, "rounds": 1, "folder": str(place / "out"), "round_timeout": PATIENCE},
        algorithm={"name": "ldp_fedexp", "target_epsilon": None, "noise_multiplier": 3.0},
        local=LOCAL,
        test={"found": str(shared)},
    )
    client = app / "federation" / "client_app.py"
    text = client.read_text()
    changed = re.sub(r"(def train\(.*\n)", r"\1    record(context)\n", text)
    assert changed != text
    client.write_text(changed + RECORD)
    site = place / "up"
    site.mkdir(mode=0o700)
    (site / "guard.toml").write_text(GUARD.format(app_hash(app)))
    quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "DPFEDEXP_DATA": ""}
    config = {"dpfedexp-guard": str(site / "guard.toml")}
    with OneOfEach(site, 2, tls=True, node_config=config, environment=quick, enforce=True) as deployment:
        addresses = [deployment.runtime(index) for index in (0, 1)]
        for address in addresses:
            wait_for(address)
        stranger = subprocess.Popen(
            as_user(
                [
                    *[sys.executable, "-c", ATTACK, str(place / "supernode0.ca"), str(shared / "stolen.json")],
                    *[str(shared / "stop"), *addresses],
                ],
                STRANGER,
            ),
            env={**deployment.environment, "HOME": str(shared), "FLWR_HOME": str(shared / "flwr")},
            cwd=shared,
        )
        shown = run(deployment, app)
        (shared / "stop").touch()
        assert stranger.wait(PATIENCE) == 0
        nodes = [(process.pid, Path(f"/proc/{process.pid}/limits").read_text()) for process in deployment.supernodes]
        log = (site / "supernode0.log").read_text()
    assert "'asked': 2, 'valid': 2, 'refused': 0" in shown, shown
    stolen = json.loads((shared / "stolen.json").read_text())
    assert stolen["got"] == []
    tried = {address: stolen["tried"].get(address, []) for address in addresses}
    assert {status for many in tried.values() for _, status in many} <= {"404", "401"}, tried
    assert any(token for token, _ in tried[addresses[0]]), (
        "Flower's own SuperExec shows the token, and it is worth nothing"
    )
    assert all(status == "404" for token, status in tried[addresses[0]] if token)
    assert not any(token for token, _ in tried[addresses[1]]), "ours does not show it"
    assert f"a process of user {STRANGER} reached for the app's task and got nothing" in log
    for index in (0, 1):
        found = json.loads((shared / f"node{index}.json").read_text())
        assert (found["user"], found["core"]) == (NOBODY, [0, 0])
        assert index == 0 or (found["dumpable"] == 0 and "token" not in found["words"])
    assert all(re.search(r"Max core file size +0 +0 ", limits) for _, limits in nodes)


def wait_for(address: str) -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens on {address}")


@contextlib.contextmanager
def gate(apart: bool) -> Iterator[int]:
    """The node's gate in front of an application that checks a secret as Flower does, and the port of it."""

    async def application(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        knows = dict(scope["headers"]).get(b"secret") == b"right"
        status = 200 if knows or scope["path"] != ACQUIRE or not apart else 401
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = SimpleNamespace(superexec_auth_secret=None, isolation="process" if apart else "subprocess")
    config.host, config.port = "127.0.0.1", free_port()
    config.runtime_ssl_certfile = config.runtime_ssl_keyfile = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flwr.supernode.main.create_app", lambda **_: application)
        server, thread = serve_runtime(config, None)
    try:
        yield config.port
    finally:
        server.should_exit = True
        thread.join()


ASK = """
import http.client, resource, sys
port, core, *asked = sys.argv[1:]
hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
if core == "0": resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for one in asked:
    path, _, secret = one.partition("=")
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    connection.request("POST", path, b"", {"secret": secret} if secret else {})
    print(connection.getresponse().status, end=" ")
"""


def ask_as(user: int, port: int, *asked: str, script: str = "", core: str = "0") -> list[int]:
    """The statuses that a process of a user gets for paths, with a secret where one is given."""
    code = [sys.executable, script] if script else [sys.executable, "-c", ASK]
    done = subprocess.run(
        as_user([*code, str(port), core, *asked], user), capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


@as_others
def test_only_the_user_who_has_shown_the_secret_is_answered():
    task = "/v1/runtime/pull-task-input"
    with gate(apart=True) as port:
        assert ask_as(NOBODY, port, task, ACQUIRE, ACQUIRE + "=wrong", task) == [404, 401, 401, 404]
        assert ask_as(NOBODY, port, ACQUIRE + "=right", task) == [200, 200]
        assert ask_as(STRANGER, port, task, ACQUIRE, ACQUIRE + "=wrong", task, "/docs") == [404, 401, 401, 404, 404]
        assert ask_as(NOBODY, port, task) == [200], "another process of the same user, as every app is"
    with gate(apart=False) as port:
        assert ask_as(os.geteuid(), port, ACQUIRE, task) == [200, 200]
        assert ask_as(STRANGER, port, ACQUIRE, task) == [404, 404], (
            "no secret is asked for here, so no other user may ask"
        )


@as_others
def test_an_app_that_may_dump_core_gets_no_task(tmp_path_factory, caplog):
    """What was shown: `flower-superexec` as the operator's page had it, whose apps hold rows and may leave them in a core."""
    place = Path(tempfile.mkdtemp(prefix="dpfedexp-test-"))
    try:
        place.chmod(0o755)
        script = place / "flower-superexec"
        script.write_text(ASK)
        with gate(apart=True) as port:
            given = {"script": str(script)}
            assert ask_as(NOBODY, port, ACQUIRE + "=right", core="0", **given) == [200]
            raised = ["prlimit", "--core=4096:4096"]
            command = as_user([sys.executable, str(script), str(port), "more", ACQUIRE + "=right"], NOBODY)
            done = subprocess.run([*raised, *command], capture_output=True, text=True, timeout=PATIENCE)
            assert done.stdout.split() == ["404"], done.stderr
        assert "may dump core, with the data in it, and gets no task: start it with `dpfedexp superexec`" in caplog.text
        assert core_dumpers(NOBODY) == []
    finally:
        shutil.rmtree(place)


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp6"), reason="only Linux tells whose a connection is")
@pytest.mark.parametrize(
    ("listens", "connects"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1")],
)
def test_the_user_of_a_connection_is_known_in_both_families(listens, connects):
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    with socket.socket(family) as server:
        if listens == "::":
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            server.bind((listens, 0))
            server.listen()
            client = socket.create_connection((connects, server.getsockname()[1]))
        except OSError:
            pytest.skip("this machine has no IPv6")
        with client:
            end, _ = server.accept()
            with end:
                assert peer(end.getpeername()[:2], end.getsockname()[:2]) == f"user {os.geteuid()}"
            assert peer(("127.0.0.1", 1), server.getsockname()[:2]) is None, "on loopback, and no such connection"
    assert peer(("192.0.2.7", 1), ("192.0.2.1", 2)) == "192.0.2.7", "another machine is known by its address"
    assert peer(("192.0.2.1", 1), ("192.0.2.1", 2)) is None, "this machine's own address, and no such connection"
    assert peer(None, None) is None


def test_a_header_does_not_say_where_a_request_comes_from():
    with gate(apart=True) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", ACQUIRE, b"", {"secret": "right", "X-Forwarded-For": "192.0.2.7"})
        assert connection.getresponse().status == 200
        other = http.client.HTTPConnection("127.0.0.1", port)
        other.request("POST", "/v1/runtime/pull-messages", b"")
        assert other.getresponse().status == 200, "it was this user who showed the secret"
