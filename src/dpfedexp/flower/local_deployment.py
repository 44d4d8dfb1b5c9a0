"""A local Flower deployment for testing: start and stop SuperLink, SuperNodes, certificates and keys together.

The SuperLink is `dpfedexp superlink`: nodes connect to a port that serves only nodes, and `flwr run` uses another port. The
processes connect to nothing outside the machine.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

from dpfedexp.errors import InputError, require
from dpfedexp.files import replace_bytes, replace_text, try_lock

CONNECTION = "up"
FOLDER = ".up"
"""Subfolder of an app with the keys, logs and state of the deployment of `dpfedexp flower up`."""
_STATE = "up.json"
_MARK = "DPFEDEXP_DEPLOYMENT"
_GUARD = "dpfedexp-guard"
_ID = re.compile(r"\s*id\s*=")
_APPS = re.compile(r"^\s*apps\s*=", re.MULTILINE)
_OURS = [sys.executable, "-m", "dpfedexp"]
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables without which Flower and Ray connect to other machines."""
DOWN = "down"
"""A file in a deployment's folder from when it begins to stop until it is started again."""


def program(name: str) -> str:
    """The path of one of Flower's programs, beside this Python or on PATH."""
    sibling = Path(sys.executable).with_name(name)
    found = str(sibling) if sibling.exists() else shutil.which(name)
    if found is None:
        raise InputError(f"the program {name!r} was not found; install Flower with: pip install 'dpfedexp[flower]'.")
    return found


class Deployment:
    """A context manager that starts the deployment and stops it on exit.

    Args:
        folder: the folder for keys, certificates, FLWR_HOME and logs (one file per process).
        node_config: additions to each node's `--node-config`, by node number, such as {0: {"data": "/path/rows.csv"}}. A node
            gets its own copy of the file "dpfedexp-guard", `guard.node<i>.toml`, and so its own ledger: a guard belongs to one
            data holder.
        enforce: whether the nodes are `dpfedexp node`, which needs a guard file.
        apps: hashes of the apps that may run on enforcing nodes whose guard file lists none.
        host: the loopback address that nodes connect to.
    """

    def __init__(
        self,
        folder: Path | str,
        nodes: int,
        *,
        node_config: Mapping[int, Mapping[str, str]] | None = None,
        environment: Mapping[str, str] | None = None,
        enforce: bool = False,
        apps: Iterable[str] = (),
        host: str = "127.0.0.1",
    ) -> None:
        require(nodes >= 1, f"nodes is {nodes}; it must be a positive whole number.")
        self.folder, self.nodes = Path(folder).resolve(), nodes
        self.node_config, self.enforce, self.apps, self.host = node_config or {}, enforce, list(apps), host
        guarded = all(_GUARD in self.node_config.get(index, {}) for index in range(nodes))
        require(guarded or not enforce, "nodes that enforce need a guard file.")
        self.mark = uuid.uuid4().hex
        self.home = self.folder / "flwr-home"
        # Flower's default is to poll for new tasks every 3 seconds.
        self.environment = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2", **os.environ, **(environment or {})}
        self.environment |= {**QUIET, "FLWR_HOME": str(self.home), _MARK: self.mark}
        # Flower starts its subprocesses by name.
        self.environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        self.superlink: subprocess.Popen[bytes] | None = None
        self.supernodes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Deployment:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.home.mkdir(parents=True, exist_ok=True)
        self.make_keys()
        self.port, self.control_port = free_port(self.host), free_port()
        self.start_superlink()
        for index in range(self.nodes):
            self.start_supernode(index)

    def make_keys(self) -> None:
        """Create the certificates, and a key for every node."""
        self.certificates = make_certificates(self.folder, self.host)
        self.keys = [make_node_key(self.folder, f"node{i}") for i in range(self.nodes)]
        self.node_list.write_text("".join(public.read_text() for _, public in self.keys), encoding="utf-8")

    @property
    def node_list(self) -> Path:
        """The path of the file with the public keys of the nodes that may connect."""
        return self.folder / "nodes.pub"

    def start_superlink(self) -> None:
        """Start the SuperLink on this deployment's ports and write the connection file for `flwr`. Its state is in memory."""
        where = f'address = "127.0.0.1:{self.control_port}"\nroot-certificates = "{self.certificates.authority}"\n'
        text = f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n{where}'
        (self.home / "config.toml").write_text(text, encoding="utf-8")
        options = ["--fleet", f"{self.host}:{self.port}", "--control-port", str(self.control_port)]
        options += [*self.certificates.options(), "--nodes", str(self.node_list)]
        self.superlink = self._spawn([*_OURS, "superlink", *options], "superlink")
        self._wait_for_port(self.superlink)

    def start_supernode(self, index: int, key: Path | None = None) -> subprocess.Popen[bytes]:
        """Start SuperNode `index`, with its registered key or another key."""
        config: dict[str, str | int] = {"partition-id": index, "num-partitions": self.nodes}
        config |= self.node_config.get(index, {})
        command = [program("flower-supernode")]
        if _GUARD in config:
            config[_GUARD] = str(self._copy_guard(index, Path(str(config[_GUARD]))))
        if self.enforce:
            command = [*_OURS, "node", "--guard", str(config.pop(_GUARD)), "--poll", "0.5"]
        text = " ".join(f'{k}="{v}"' if isinstance(v, str) else f"{k}={v}" for k, v in config.items())
        options = ["--superlink", f"{self.host}:{self.port}", "--host", "127.0.0.1", "--port", str(free_port())]
        options += ["--node-config", text, "--root-certificates", str(self.certificates.authority)]
        options += [*self.certificates.options(), "--auth-supernode-private-key", str(key or self.keys[index][0])]
        process = self._spawn([*command, *options], f"supernode{index}")
        self.supernodes.append(process)
        return process

    def _copy_guard(self, index: int, guard: Path) -> Path:
        """Copy the guard file without its id, because every node has its own ledger, in a file beside the copy."""
        own = guard.with_name(f"{guard.stem}.node{index}{guard.suffix}")
        text = "".join(line for line in guard.read_text(encoding="utf-8").splitlines(True) if not _ID.match(line))
        if self.enforce and self.apps and not _APPS.search(text):
            text += f"\napps = {json.dumps(self.apps)}\n"
        replace_text(own, text, mode=0o600)
        return own

    def failed(self) -> str | None:
        """A sentence about a process that ended unexpectedly; None while all run."""
        started = [("flower-superlink", self.superlink), *((f"supernode{i}", p) for i, p in enumerate(self.supernodes))]
        for name, process in started:
            if process is not None and process.poll() is not None:
                return f"{name} ended with code {process.returncode}; its log is in {self.folder}."
        return None

    def stop(self) -> None:
        """Terminate all processes, then kill the rest. A mark in the environment finds Flower's detached subprocesses."""
        started = [process for process in (*self.supernodes, self.superlink) if process is not None]
        for process in started:
            process.terminate()
        self._wait_for_the_end()
        for process in started:
            process.kill()
        kill_processes_of(self.mark)
        self._wait_for_the_end()
        self.supernodes, self.superlink = [], None

    def _wait_for_the_end(self) -> None:
        deadline = time.monotonic() + 5.0
        while time.monotonic() < deadline:
            ended = [p is None or p.poll() is not None for p in [*self.supernodes, self.superlink]]
            if all(ended) and not processes_of(self.mark):
                return
            time.sleep(0.1)

    def _spawn(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with open(self.folder / f"{name}.log", "ab") as log:
            return subprocess.Popen(
                command,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _wait_for_port(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + 180.0
        while time.monotonic() < deadline and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection((self.host, self.port), timeout=0.5):
                return
            time.sleep(0.1)
        raise InputError(f"the SuperLink did not start within 180 seconds; its log is in {self.folder}.")


@contextlib.contextmanager
def running(deployment: Deployment) -> Iterator[None]:
    """Start a deployment, and stop it when the context ends. A locked file in its folder marks it as running."""
    deployment.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with open(deployment.folder / _STATE, "a+", encoding="utf-8") as state:
        try:
            try_lock(state.fileno())
        except BlockingIOError:
            already = "the nodes of this folder are up already; stop them with `dpfedexp flower down`."
            raise InputError(already) from None
        _stop_leftovers(state.name)
        with deployment:
            state.truncate(0)
            keys = {"mark": deployment.mark, "pid": os.getpid(), "nodes": deployment.nodes}
            state.write(json.dumps({**keys, "node_list": str(deployment.node_list)}))
            state.flush()
            (deployment.folder / DOWN).unlink(missing_ok=True)
            try:
                yield
            finally:
                (deployment.folder / DOWN).touch()
        state.truncate(0)


def find_running(folder: Path) -> dict[str, Any] | None:
    """The facts of the deployment that runs in this folder; empty while it starts, None if none runs."""
    try:
        with open(folder / _STATE, encoding="utf-8") as state:
            try:
                try_lock(state.fileno())
                return None
            except BlockingIOError:
                text = state.read()
                return dict(json.loads(text)) if text else {}
    except FileNotFoundError:
        return None


def stop_running(folder: Path) -> bool:
    """Stop the deployment of this folder, and processes that a killed one has left; return whether there were any."""
    known = find_running(folder)
    if known is None:
        return (folder / _STATE).exists() and _stop_leftovers(folder / _STATE)
    require("pid" in known, "the nodes are still starting; try again in a moment.")
    os.kill(known["pid"], signal.SIGTERM)
    deadline = time.monotonic() + 60.0
    while find_running(folder) is not None:
        require(time.monotonic() < deadline, "the nodes have not ended within 60 seconds; try again.")
        time.sleep(0.2)
    return True


def _stop_leftovers(state: Path | str) -> bool:
    """Kill the processes of a deployment whose own process was killed; return whether there were any."""
    text = Path(state).read_text(encoding="utf-8")
    return bool(text) and kill_processes_of(json.loads(text)["mark"])


def run_is_under_way(folder: Path) -> bool:
    """Whether a server app of this folder's deployment runs; False where there is no /proc."""
    found = b""
    for pid in processes_of((find_running(folder) or {}).get("mark", "")):
        with contextlib.suppress(OSError):
            found += Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"flwr-serverapp" in found


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def processes_of(mark: str, name: str = _MARK) -> list[int]:
    """Ids of a deployment's processes, found by a mark in their environment; empty where there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{name}={mark}\0".encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return [pid for pid in found if pid != os.getpid()]


def kill_processes_of(mark: str) -> bool:
    """Kill a deployment's processes; return whether there were any."""
    left = processes_of(mark)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return bool(left)


class Certificates(NamedTuple):
    """Files of this deployment's certificate authority, and of a server certificate and key for loopback."""

    authority: Path
    certificate: Path
    key: Path

    def options(self) -> list[str]:
        """The options of Flower's programs for a server with this certificate."""
        files = {"--ssl-ca-certfile": self.authority, "--ssl-certfile": self.certificate, "--ssl-keyfile": self.key}
        return [word for name, path in files.items() for word in (name, str(path))]


def make_certificates(folder: Path, host: str = "127.0.0.1") -> Certificates:
    """Create an authority and a server certificate for 127.0.0.1, localhost and `host`."""
    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = _certificate("dpfedexp local authority", authority_key, None, authority_key)
    server = _certificate("localhost", server_key, authority, authority_key, {"127.0.0.1", host})
    paths = Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    paths.authority.write_bytes(authority.public_bytes(Encoding.PEM))
    paths.certificate.write_bytes(server.public_bytes(Encoding.PEM))
    secret = server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    replace_bytes(paths.key, secret, 0o600)
    return paths


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """The key pair by which a SuperNode authenticates: its private file and the public file to register, created if missing.

    A run is bound to its nodes' keys, so it can only be resumed with the same ones.
    """
    private, public = folder / name, folder / f"{name}.pub"
    if private.is_file() and public.is_file():
        return private, public
    key = ec.generate_private_key(ec.SECP384R1())
    replace_bytes(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
    return private, public


def _certificate(
    name: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: x509.Certificate | None,
    signer: ec.EllipticCurvePrivateKey,
    addresses: Iterable[str] = (),
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=30))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    if issuer is None:
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        return builder.add_extension(usage, critical=True).sign(signer, hashes.SHA256())
    names = [x509.DNSName("localhost"), *(x509.IPAddress(ipaddress.ip_address(one)) for one in addresses)]
    return builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(signer, hashes.SHA256())
