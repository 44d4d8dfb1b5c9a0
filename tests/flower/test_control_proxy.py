"""The example's mutual TLS in front of Control, with nginx itself: a certificate of the operators' authority, or nothing."""

import contextlib
import http.client
import os
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dpfedexp.flower.local_deployment import Certificates, Deployment, free_port, make_certificates
from tests.sizes import long

from .app_folder import LOCAL, PATIENCE, QUICK, listens, make_app, run_app, wait_until

PROXY = Path(__file__).parents[2] / "examples" / "deploy" / "proxy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not here")


@contextlib.contextmanager
def nginx(name: str, place: Path, changes: dict[str, str], port: int) -> Iterator[None]:
    """nginx with the example's file, whose paths and ports are changed to those of the test and nothing else."""
    place.mkdir(exist_ok=True)
    text = (PROXY / name).read_text()
    text = text.replace("/tmp/", f"{place}/").replace("/var/log/nginx/", f"{place}/")
    for old, new in changes.items():
        assert old in text, f"{name} has no {old}"
        text = text.replace(old, new)
    (place / name).write_text(text)
    # Started by root, nginx would answer as another user.
    same_user = ["-g", "user root;"] if os.getuid() == 0 else []
    with open(place / "error.log", "wb") as log:
        process = subprocess.Popen([str(NGINX), "-e", "stderr", "-c", str(place / name), *same_user], stderr=log)

    try:
        wait_until(lambda: listens(port), "the start of nginx", process)
        yield
    finally:
        process.terminate()
        process.wait(PATIENCE)


@contextlib.contextmanager
def control_proxy(place: Path, certificates: Certificates, operators: Path, upstream: int) -> Iterator[int]:
    """The server's end, in front of what listens on a port of loopback; its own port."""
    port = free_port()
    changes = {
        "/etc/dpfedexp/server.pem": str(certificates.certificate),
        "/etc/dpfedexp/server.key": str(certificates.key),
        "/etc/dpfedexp/ca.crt": str(certificates.authority),
        "/etc/dpfedexp/operators.crt": str(operators),
        "fl.example.org": "localhost",
        "127.0.0.1:9093": f"127.0.0.1:{upstream}",
        "listen 9443": f"listen 127.0.0.1:{port}",
    }
    with nginx("control.conf", place, changes, port):
        yield port


@contextlib.contextmanager
def upstream(certificates: Certificates) -> Iterator[tuple[int, list[str]]]:
    """What stands in for the SuperLink: says 200 to everything, and remembers what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.certificate, certificates.key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port, asked
    finally:
        server.shutdown()


def authority(folder: Path) -> Certificates:
    """A new authority with a certificate."""
    folder.mkdir()
    return make_certificates(folder)


def status_of(port: int, server: Certificates, shown: Certificates | None, path: str) -> int:
    trust = ssl.create_default_context(cafile=str(server.authority))
    if shown is not None:
        trust.load_cert_chain(shown.certificate, shown.key)
    connection = http.client.HTTPSConnection("localhost", port, context=trust, timeout=PATIENCE)
    connection.request("POST", path, b"", {"Content-Type": "application/x-protobuf"})
    return connection.getresponse().status


def test_only_a_certificate_of_the_operators_authority_reaches_control_and_nothing_else_than_control(tmp_path):
    server, operators = authority(tmp_path / "server"), authority(tmp_path / "operators")
    place = tmp_path / "proxy"
    with upstream(server) as (inner, asked), control_proxy(place, server, operators.authority, inner) as port:
        start = "/v1/control/start-run"
        assert status_of(port, server, None, start) == 400
        assert status_of(port, server, server, start) == 400, "the server's own authority is not the operators'"
        assert asked == []
        for path in ("/v1/runtime/acquire-task", "/v1/fleet/pull-messages", "/v1/control/../runtime/x", "/health"):
            assert status_of(port, server, operators, path) == 404, path
        assert asked == []
        assert status_of(port, server, operators, start) == 200
        assert asked == [start]
    # Once nginx has ended: it writes a line after the answer.
    log = (tmp_path / "proxy" / "access.log").read_text()
    assert '"CN=localhost" POST /v1/control/start-run 200' in log, "by name, who asked for what"


def test_a_superlink_of_another_authority_is_not_believed(tmp_path):
    server, operators = authority(tmp_path / "server"), authority(tmp_path / "operators")
    place = tmp_path / "proxy"
    with upstream(operators) as (inner, asked), control_proxy(place, server, operators.authority, inner) as port:
        assert status_of(port, server, operators, "/v1/control/start-run") == 502
        assert asked == []


@long
@pytest.mark.usefixtures("alone")
def test_a_run_is_started_through_both_ends_and_without_a_certificate_it_is_not(tmp_path):
    """`dpfedexp flower run` → nginx of the operator → nginx of the server → a SuperLink with one node."""
    operators = authority(tmp_path / "operators")
    app = make_app(
        tmp_path / "app",
        federation={"clients": 1, "rounds": 1, "folder": str(tmp_path / "out"), "node_timeout": PATIENCE},
        algorithm={"name": "cdp_fedexp"},
        local=LOCAL,
    )
    with Deployment(tmp_path / "up", 1, environment=QUICK) as deployment:
        server = deployment.certificates
        with control_proxy(tmp_path / "proxy", server, operators.authority, deployment.control_port) as outer:
            refused = through(deployment, tmp_path / "stranger", app, outer, server)
            assert refused.returncode == 2, refused.stdout
            assert not (tmp_path / "out").exists()
            done = through(deployment, tmp_path / "operator", app, outer, operators)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "completed: 1 of 1 rounds" in done.stdout
            assert (tmp_path / "out" / "privacy.txt").exists()


def through(deployment: Deployment, home: Path, app: Path, outer: int, shown: Certificates):
    """The run of an app from a machine that shows this certificate."""
    home.mkdir()
    local = free_port()
    changes = {
        "operator.pem": str(shown.certificate),
        "operator.key": str(shown.key),
        " ca.crt": f" {deployment.certificates.authority}",
        "https://fl.example.org:9443": f"https://127.0.0.1:{outer}",
        "fl.example.org": "localhost",
        "127.0.0.1:9093": f"127.0.0.1:{local}",
    }
    config = (PROXY / "config.toml").read_text()
    (home / "config.toml").write_text(config.replace("127.0.0.1:9093", f"127.0.0.1:{local}"))
    with nginx("operator.conf", home, changes, local):
        return run_app(app, {**deployment.environment, "FLWR_HOME": str(home)}, connection="server")
