"""The examples for compose, systemd and Kubernetes: they parse, their commands exist, and they keep apart what must be apart."""

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from dpfedexp.cli import app

EXAMPLES = Path(__file__).parents[1] / "examples" / "deploy"
SYSTEMD = sorted((EXAMPLES / "systemd").glob("*.service"))
FLOWERS = {"--superlink", "--root-certificates", "--auth-supernode-private-key", "--isolation", "--host", "--port"}
FLOWERS |= {"--runtime-api-address", "--superexec-auth-secret-file", "--node-config"}
FLOWERS |= {"--ssl-ca-certfile", "--ssl-certfile", "--ssl-keyfile"}


def composed(name: str) -> dict:
    return yaml.safe_load((EXAMPLES / "compose" / f"{name}.yaml").read_text())


def kubernetes(name: str) -> list[dict]:
    return list(yaml.safe_load_all((EXAMPLES / "kubernetes" / f"{name}.yaml").read_text()))


def exec_start(path: Path) -> list[str]:
    text = path.read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("ExecStart="))
    return shlex.split(line.removeprefix("ExecStart="))


def commands() -> dict[str, list[str]]:
    found = {path.name: exec_start(path) for path in SYSTEMD if path.stem != "dpfedexp-control"}
    for name in ("server", "site"):
        for service, content in composed(name)["services"].items():
            found[f"compose {service}"] = shlex.split(content["command"])
        for item in kubernetes(name):
            if item["kind"] == "Deployment":
                container = item["spec"]["template"]["spec"]["containers"][0]
                found[f"kubernetes {container['name']}"] = container["args"]
    return found


COMMANDS = commands()
PROXY = EXAMPLES / "proxy"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_of_the_example_exists_with_its_options(name):
    words = COMMANDS[name]
    assert words[0].endswith("dpfedexp")
    if words[1] == "superexec":
        from flwr.supercore.cli.flower_superexec import _parse_args

        _parse_args().parse_args(words[2:])
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


def test_what_starts_runs_from_elsewhere_is_a_part_of_its_own_and_asks_for_a_certificate():
    """The proxy is in files that an operator must name; it is the SuperLink's user on the SuperLink's loopback."""
    conf = (PROXY / "control.conf").read_text()
    for line in ("listen 9443 ssl;", "ssl_verify_client on;", "ssl_client_certificate /etc/dpfedexp/operators.crt;"):
        assert conf.count(line) == 1
    assert conf.count("proxy_pass") == 1
    assert "location /v1/control/ {\n            proxy_pass https://127.0.0.1:9093;" in conf
    assert "proxy_ssl_verify on;" in conf
    (patch,) = kubernetes("control-patch")
    pod = patch["spec"]["template"]["spec"]
    starts = [exec_start(EXAMPLES / "systemd" / "dpfedexp-control.service"), pod["containers"][0]["command"]]
    for words in (*starts, composed("control")["services"]["control"]["entrypoint"]):
        assert words[0].endswith("nginx")
        assert words[1:4] == ["-e", "stderr", "-c"]
        assert Path(words[4]).name == "control.conf"
    control = composed("control")["services"]
    server = composed("server")["services"]["superlink"]
    assert control["superlink"] == {"ports": ["9443:9443"]}
    assert control["control"]["network_mode"] == "service:superlink"
    assert control["control"]["user"] == server["user"]
    assert "ports" not in control["control"]
    assert set(control["control"]["volumes"]) >= {"./server:/etc/dpfedexp:ro"}
    unit, link = ((EXAMPLES / "systemd" / f"dpfedexp-{name}.service").read_text() for name in ("control", "superlink"))
    user = next(line for line in link.splitlines() if line.startswith("User="))
    assert user in unit.splitlines()
    mounted = {volume["name"] for volume in pod["volumes"]} | {"server"}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} <= mounted
    services = [item for item in kubernetes("control") if item["kind"] == "Service"]
    assert [port["port"] for service in services for port in service["spec"]["ports"]] == [9443]


def test_the_operators_end_shows_a_certificate_and_listens_on_loopback():
    conf = (PROXY / "operator.conf").read_text()
    assert [line.strip() for line in conf.splitlines() if "listen" in line] == ["listen 127.0.0.1:9093;"]
    assert "proxy_ssl_certificate operator.pem;" in conf
    assert "proxy_ssl_verify on;" in conf
    flower = tomllib.loads((PROXY / "config.toml").read_text())["superlink"]["server"]
    assert flower == {"address": "127.0.0.1:9093", "insecure": True}


def test_every_folder_that_is_written_is_a_volume_of_the_user_that_writes_it():
    """A volume of compose's is root's unless the image has the folder: then it is that folder's owner's."""
    image = (EXAMPLES / "Dockerfile").read_text()
    owners = {
        place: owner
        for owner, places in re.findall(r"install -d -m 0700 -o (\d+) -g \d+ ([^\\\n]+)", image)
        for place in places.split()
    }
    for name in ("server", "site"):
        content = composed(name)
        for service in content["services"].values():
            for volume in service.get("volumes", []):
                source, place = volume.split(":")[:2]
                if source in content["volumes"]:
                    assert owners[place] == service["user"].partition(":")[0], (name, volume)


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
        text = re.sub("/opt/dpfedexp/bin/dpfedexp|/usr/sbin/nginx", "/bin/true", path.read_text())
        (tmp_path / path.name).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", *sorted(tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
    )
    complaints = [line for line in done.stderr.splitlines() if "dpfedexp" in line]
    assert complaints == [], done.stderr
