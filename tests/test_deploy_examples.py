"""The examples for compose, systemd and Kubernetes: they parse, their commands exist, and they keep apart what must be apart."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from dpfedexp.cli import app

EXAMPLES = Path(__file__).parents[1] / "examples" / "deploy"
SYSTEMD = sorted((EXAMPLES / "systemd").glob("*.service"))
FLOWERS = {"--superlink", "--root-certificates", "--auth-supernode-private-key", "--isolation", "--host", "--port"}
FLOWERS |= {"--superexec-auth-secret-file", "--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile", "--node-config"}


def composed(name: str) -> dict:
    return yaml.safe_load((EXAMPLES / "compose" / f"{name}.yaml").read_text())


def kubernetes(name: str) -> list[dict]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / f"{name}.yaml").read_text()))


def exec_start(path: Path) -> list[str]:
    text = path.read_text().replace("\\\n", " ")
    return shlex.split(
        next(line for line in text.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")
    )


def commands() -> dict[str, list[str]]:
    found = {path.name: exec_start(path) for path in SYSTEMD}
    for name in ("server", "site"):
        for service, content in composed(name)["services"].items():
            found[f"compose {service}"] = shlex.split(content["command"])
        for item in kubernetes(name):
            if item["kind"] == "Deployment":
                container = item["spec"]["template"]["spec"]["containers"][0]
                found[f"kubernetes {container['name']}"] = container["args"]
    return found


COMMANDS = commands()


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_of_the_example_exists_with_its_options(name):
    words = COMMANDS[name]
    if words[0].endswith("flower-superexec"):
        from flwr.supercore.cli.flower_superexec import _parse_args

        _parse_args().parse_args(words[1:])
        return
    assert words[0].endswith("dpfedexp")
    command, rest = get_command(app), words[1:]
    while hasattr(command, "commands"):
        command, rest = command.commands[rest[0]], rest[1:]
    context = command.make_context(command.name, rest)
    assert {word for word in context.args if word.startswith("--")} <= FLOWERS
    assert not any(word in ("--insecure", "--database") for word in words)


def test_what_is_open_to_the_network_is_the_fleet_port_alone():
    ports = {port for service in composed("server")["services"].values() for port in service.get("ports", [])}
    assert ports == {"9092:9092", "127.0.0.1:9464:9464"}
    assert not any("ports" in service for service in composed("site")["services"].values())
    for item in kubernetes("server"):
        if item["kind"] == "Service":
            assert [port["port"] for port in item["spec"]["ports"]] == [9092]
    for name, words in COMMANDS.items():
        if "superlink" in words:
            assert words[words.index("--fleet") + 1] == "0.0.0.0:9092", name
            assert "--control-port" not in words, "the default is on loopback"


def test_the_app_has_another_user_than_the_site_and_no_network_but_the_nodes():
    site = composed("site")
    users = {service["user"] for service in site["services"].values()}
    assert len(users) == 2
    assert site["services"]["app"]["networks"] == ["runtime"]
    assert site["networks"]["runtime"] == {"internal": True}
    mounted = " ".join(site["services"]["app"]["volumes"])
    assert "/data:ro" in mounted
    assert not any(secret in mounted for secret in ("ledger", "anchor", "/etc/dpfedexp"))
    pods = {item["metadata"]["name"]: item for item in kubernetes("site") if item["kind"] == "Deployment"}
    ids = [pods[name]["spec"]["template"]["spec"]["securityContext"]["runAsUser"] for name in ("node", "app")]
    assert ids == [10002, 10003]
    policy = next(item for item in kubernetes("site") if item["metadata"]["name"] == "app-reaches-node-only")
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    units = {path.stem: path.read_text() for path in SYSTEMD}
    assert "User=dpfedexp-site" in units["dpfedexp-node"]
    assert "User=dpfedexp-app" in units["dpfedexp-app"]
    assert "IPAddressDeny=any" in units["dpfedexp-app"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_understands_the_units(tmp_path):
    for path in SYSTEMD:
        text = (
            path.read_text()
            .replace("/opt/dpfedexp/bin/dpfedexp", "/bin/true")
            .replace("/opt/dpfedexp/bin/flower-superexec", "/bin/true")
        )
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *sorted(tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "dpfedexp" in line]
    assert complaints == [], done.stderr
