"""An enforcing site with real processes of three users, the site's, the apps' and a stranger: what an app finds and gets out, and
what another user of the machine can reach."""

import contextlib
import http.client
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from dpfedexp.accounting import Ledger
from dpfedexp.flower.access import core_dumpers, peer
from dpfedexp.flower.app import app_hash
from dpfedexp.flower.local_deployment import Deployment, free_port, program
from dpfedexp.flower.site import ACQUIRE, NO_REPORT, serve_runtime
from tests.sizes import long

from .app_folder import LOCAL, PATIENCE, QUICK, listens, make_app, run_app, wait_until
from .other_user import APP_USER, STRANGER, as_user, can_switch_user

as_others = pytest.mark.skipif(not can_switch_user(), reason="only root on Linux can start processes as other users")

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
SPY = """

def record(context):
    import ctypes, json, os, resource
    from pathlib import Path
    found = {"user": os.getuid(), "core": resource.getrlimit(resource.RLIMIT_CORE), "dumpable": ctypes.CDLL(None).prctl(3)}
    found |= {"words": Path("/proc/self/cmdline").read_bytes().decode(), "opened": []}
    for path in sorted(Path(context.run_config["test.site"]).rglob("*")):
        for flags in (os.O_RDONLY, os.O_WRONLY):
            try:
                os.close(os.open(path, flags))
                found["opened"].append(path.name)
            except OSError:
                pass
    node = context.node_config["partition-id"]
    Path(context.run_config["test.found"], f"node{node}.json").write_text(json.dumps(found))

@app.train()
def train(message: Message, context: Context) -> Message:
    # Node 0 returns rows in every way that Flower has.
    from flwr.app import ConfigRecord, MetricRecord
    record(context)
    if context.node_config["partition-id"] == 1:
        return private_training(message, context, honest)
    rows = message.content.array_records["arrays"]
    fields = {"round": 1, "nonce": message.content.config_records["dpfedexp"]["nonce"], "note": "row 47110815"}
    metrics = MetricRecord({"rows": [4711.0815]})
    records = RecordDict({"dpfedexp.report": rows, "dpfedexp": ConfigRecord(fields), "m": metrics})
    return Message(records, reply_to=message)
"""
GUARD = """
max_epsilon_per_round = 50.0
max_epsilon_total = 100.0
delta = 1e-5
mechanisms = ["local-gaussian"]
max_clip = 1.0
apps = ["{}"]
"""


class Apart(Deployment):
    """Two enforcing nodes with `--isolation process`, and a SuperExec for each that runs the apps as another user.

    Node 0 has Flower's own SuperExec, without cores; node 1 has `dpfedexp superexec`.
    """

    def __init__(self, place: Path, app: Path) -> None:
        site = place / "up"
        site.mkdir(mode=0o700)
        (site / "guard.toml").write_text(GUARD.format(app_hash(app)))
        config, self.runtime = {"dpfedexp-guard": str(site / "guard.toml")}, {}
        super().__init__(site, 2, node_config={0: config, 1: config}, environment=QUICK, enforce=True)

    def _spawn(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        if not name.startswith("supernode"):
            return super()._spawn(command, name)
        place = self.folder.parent
        home, secret, authority = place / f"home-{name}", place / f"{name}.secret", place / f"{name}.ca"
        home.mkdir()
        os.chown(home, APP_USER, APP_USER)
        secret.write_bytes(os.urandom(32))
        os.chown(secret, 0, APP_USER)
        secret.chmod(0o640)
        node = super()._spawn([*command, "--isolation", "process", "--superexec-auth-secret-file", str(secret)], name)
        shutil.copyfile(self.certificates.authority, authority)
        authority.chmod(0o644)
        self.runtime[name] = f"127.0.0.1:{command[command.index('--port') + 1]}"
        flowers = ["sh", "-c", 'ulimit -c 0; exec "$@"', "sh", sys.executable, program("flower-superexec")]
        ours = [sys.executable, "-m", "dpfedexp", "superexec"]
        options = ["--runtime-api-address", self.runtime[name], "--root-certificates", str(authority)]
        options += ["--superexec-auth-secret-file", str(secret)]
        apps = as_user([*(flowers if name == "supernode0" else ours), *options], APP_USER)
        super()._spawn(["env", f"--chdir={home}", f"FLWR_HOME={home}", f"HOME={home}", *apps], f"{name}-app")
        return node


@long
@as_others
@pytest.mark.usefixtures("alone")
def test_an_app_reads_no_secret_and_gets_nothing_out_and_a_stranger_gets_no_task_with_or_without_a_token(public_place):
    """What was shown: the token is in a world-readable command line; with it one gets model and app, and the site is silent.

    Node 0 is hostile, node 1 honest. One round, local privacy.
    """
    place, shared, out, site = (public_place / name for name in ("", "shared", "out", "up"))
    settings = {"clients": 2, "rounds": 1, "min_reply_fraction": 0.5, "folder": str(out), "round_timeout": PATIENCE}
    app = make_app(
        place / "app",
        federation=settings,
        algorithm={"name": "ldp_fedexp", "target_epsilon": None, "noise_multiplier": 3.0},
        local=LOCAL,
        test={"site": str(site), "found": str(shared)},
    )
    client = app / "federation" / "client_app.py"
    text = client.read_text()
    changed = text.replace("@app.train(mods=[private_training])\ndef train(", "def honest(")
    assert changed != text
    client.write_text(changed + SPY)
    with Apart(place, app) as deployment:
        addresses = [deployment.runtime[f"supernode{index}"] for index in (0, 1)]
        for address in addresses:
            wait_until(lambda where=address: listens(int(where.split(":")[1])), f"a server on {address}")
        words = [sys.executable, "-c", ATTACK, str(place / "supernode0.ca"), str(shared / "stolen.json")]
        stranger = subprocess.Popen(
            as_user([*words, str(shared / "stop"), *addresses], STRANGER),
            env={**deployment.environment, "HOME": str(shared), "FLWR_HOME": str(shared / "flwr")},
            cwd=shared,
        )
        shown = run_app(app, deployment.environment).stdout
        (shared / "stop").touch()
        assert stranger.wait(PATIENCE) == 0
        limits = [Path(f"/proc/{process.pid}/limits").read_text() for process in deployment.supernodes]
        log = (site / "supernode0.log").read_text()
    assert "asked 2, valid 1, refused 1" in shown, shown
    assert NO_REPORT in shown
    for path in [*site.glob("superlink.log"), *out.rglob("*")]:
        assert b"4711" not in path.read_bytes()
    assert [len(Ledger.open(site / f"guard.node{i}.ledger.jsonl", read_only=True)) for i in (0, 1)] == [0, 1]
    stolen = json.loads((shared / "stolen.json").read_text())
    assert stolen["got"] == []
    tried = [stolen["tried"].get(address, []) for address in addresses]
    assert {status for many in tried for _, status in many} <= {"404", "401"}, tried
    assert any(token for token, _ in tried[0]), "Flower's own SuperExec shows the token, and it is worth nothing"
    assert all(status == "404" for token, status in tried[0] if token)
    assert not any(token for token, _ in tried[1]), "ours does not show it"
    assert f"a process of user {STRANGER} requested the app's task and was refused" in log
    for index in (0, 1):
        found = json.loads((shared / f"node{index}.json").read_text())
        assert (found["user"], found["core"], found["opened"]) == (APP_USER, [0, 0], []), "it saw the site's files"
        assert index == 0 or (found["dumpable"] == 0 and "token" not in found["words"])
    assert all(re.search(r"Max core file size +0 +0 ", text) for text in limits)


@contextlib.contextmanager
def gate(other_user: bool) -> Iterator[int]:
    """The node's gate in front of an application that checks a secret as Flower does, and the port of it."""

    async def application(scope, receive, send):
        if scope["type"] == "lifespan":
            return
        knows = dict(scope["headers"]).get(b"secret") == b"right"
        status = 200 if knows or scope["path"] != ACQUIRE or not other_user else 401
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    config = SimpleNamespace(superexec_auth_secret=None, isolation="process" if other_user else "subprocess")
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
if core == "0": resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
for one in asked:
    path, _, secret = one.partition("=")
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    connection.request("POST", path, b"", {"secret": secret} if secret else {})
    print(connection.getresponse().status, end=" ")
"""


def ask_as(user: int, port: int, *asked: str, script: str = "") -> list[int]:
    """The statuses that a process of a user gets for paths, with a secret where one is given."""
    code = [sys.executable, script] if script else [sys.executable, "-c", ASK]
    command = as_user([*code, str(port), "0", *asked], user)
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return [int(status) for status in done.stdout.split()]


@as_others
def test_only_the_user_who_has_shown_the_secret_is_answered():
    task = "/v1/runtime/pull-task-input"
    with gate(other_user=True) as port:
        assert ask_as(APP_USER, port, task, ACQUIRE, ACQUIRE + "=wrong", task) == [404, 401, 401, 404]
        assert ask_as(APP_USER, port, ACQUIRE + "=right", task) == [200, 200]
        assert ask_as(STRANGER, port, task, ACQUIRE, ACQUIRE + "=wrong", task, "/docs") == [404, 401, 401, 404, 404]
        assert ask_as(APP_USER, port, task) == [200], "another process of the same user, as every app is"
    with gate(other_user=False) as port:
        assert ask_as(os.geteuid(), port, ACQUIRE, task) == [200, 200]
        assert ask_as(STRANGER, port, ACQUIRE, task) == [404, 404], "without a secret no other user may ask"


@as_others
def test_an_app_that_may_dump_core_gets_no_task(public_place, caplog):
    """What was shown: `flower-superexec` as the operator's page had it, whose apps hold rows and may leave them in a core."""
    if 0 <= resource.getrlimit(resource.RLIMIT_CORE)[1] < 4096:
        pytest.skip("children of this process can't dump core, and may not raise that limit")
    script = public_place / "flower-superexec"
    script.write_text(ASK)
    with gate(other_user=True) as port:
        assert ask_as(APP_USER, port, ACQUIRE + "=right", script=str(script)) == [200]
        command = as_user([sys.executable, str(script), str(port), "more", ACQUIRE + "=right"], APP_USER)
        raised = ["prlimit", "--core=4096:4096", *command]
        done = subprocess.run(raised, capture_output=True, text=True, timeout=PATIENCE)
        assert done.stdout.split() == ["404"], done.stderr
    assert "may dump core, with the data in it, and gets no task: start it with `dpfedexp superexec`" in caplog.text
    assert core_dumpers(APP_USER) == []


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp6"), reason="only Linux tells whose a connection is")
@pytest.mark.parametrize(
    ("serves", "connects"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("127.0.0.1", "::ffff:127.0.0.1")],
)
def test_the_user_of_a_connection_is_known_in_both_families(serves, connects):
    family = socket.AF_INET6 if ":" in serves else socket.AF_INET
    with socket.socket(family) as server:
        if serves == "::":
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            server.bind((serves, 0))
            server.listen()
            client = socket.create_connection((connects, server.getsockname()[1]))
        except OSError:
            pytest.skip("this machine has no IPv6")
        with client:
            end, _ = server.accept()
            with end:
                addresses = end.getpeername()[:2], end.getsockname()[:2]
                assert peer(*addresses) == f"user {os.geteuid()}"
                client.close()
                assert peer(*addresses) is None, "the kernel lists a closed socket as root's, whoever opened it"
            assert peer(("127.0.0.1", 1), server.getsockname()[:2]) is None, "on loopback, and no such connection"
    assert peer(("192.0.2.7", 1), ("192.0.2.1", 2)) == "192.0.2.7", "another machine is known by its address"
    assert peer(("192.0.2.1", 1), ("192.0.2.1", 2)) is None, "this machine's own address, and no such connection"
    assert peer(None, None) is None


def test_a_header_does_not_say_where_a_request_comes_from(monkeypatch):
    # Tests beside this one may run Flower's own programs as the same user.
    monkeypatch.setattr("dpfedexp.flower.site.core_dumpers", lambda user: [])
    with gate(other_user=True) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", ACQUIRE, b"", {"secret": "right", "X-Forwarded-For": "192.0.2.7"})
        assert connection.getresponse().status == 200
        other = http.client.HTTPConnection("127.0.0.1", port)
        other.request("POST", "/v1/runtime/pull-messages", b"")
        assert other.getresponse().status == 200, "it was this user who showed the secret"
