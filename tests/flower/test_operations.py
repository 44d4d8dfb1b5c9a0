"""What an operator and monitoring see: status, exit codes, metrics, health, and what a site has spent."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from dpfedexp.accounting import Ledger, Sampling, compose
from dpfedexp.cli import app
from dpfedexp.cli.flower import _files_of_nodes
from dpfedexp.errors import InputError, RoundFailed
from dpfedexp.flower import app as flower_app
from dpfedexp.flower.access import check_file
from dpfedexp.flower.app import app_hash, new_app, paths_from_here, read_overrides, run_app
from dpfedexp.flower.guard import Guard
from dpfedexp.flower.local_deployment import (
    DOWN,
    Deployment,
    find_running,
    processes_of,
    running,
    stop_running,
)
from dpfedexp.flower.messages import NodeRequest
from dpfedexp.flower.monitor import guard_metrics, guard_summary, metrics_server, read_status, run_metrics, to_text
from dpfedexp.mechanisms import LocalGaussian

from ..mechanisms.parties import MECHANISM, helper_file, round_of
from .test_mod import guard_file
from .test_nodes import ADD, Nodes, start

pytestmark = pytest.mark.usefixtures("silent", "sleepless")

THREE = {1: 0, 2: 1, 3: 2}


def invoke(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a run's metrics."""
    with metrics_server(lambda: run_metrics(folder), "127.0.0.1", 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def guard(tmp_path) -> Guard:
    (tmp_path / "site").mkdir()
    path = guard_file(tmp_path / "site", max_epsilon_per_round=5.0, max_epsilon_total=6.0, apps=["ab" * 32])
    path.chmod(0o600)
    return Guard.load(path)


@pytest.fixture
def own_app(tmp_path) -> Path:
    """The template's app."""
    new_app(tmp_path / "app")
    return tmp_path / "app"


@pytest.fixture
def complete(tmp_path) -> Path:
    """The folder of a complete run."""
    start(tmp_path / "run", Nodes(THREE))
    return tmp_path / "run"


def kill(run: Path) -> str:
    """Make a complete run look like one that was killed; returns its status file's text."""
    text = (run / "status.json").read_text().replace("completed", "running")
    (run / "status.json").write_text(text)
    return text


def charge(guard: Guard, round: int = 1) -> None:
    request = NodeRequest(round, "n" * 32, LocalGaussian(0.5, 3.0).secure(), Sampling())
    guard.admit(request, run="11", app="ab" * 32)


def test_status_and_statement_are_there_after_every_round_and_say_how_it_ended(tmp_path):
    def statement() -> dict:
        return json.loads((tmp_path / "privacy.json").read_text())

    grid, seen = Nodes(THREE), []
    grid.reply_of = lambda message, reply: seen.append((read_status(tmp_path), statement()["rounds"])) or reply
    start(tmp_path, grid, rounds=2)
    told = [(status["status"], status["round"], rounds) for status, rounds in seen]
    assert told == [("running", 0, 0)] * 3 + [("running", 1, 1)] * 3
    assert seen[0][0]["epsilon"] == 0.0 < seen[3][0]["epsilon"]
    end = read_status(tmp_path)
    assert (end["status"], end["round"], end["rounds"], end["reason"]) == ("completed", 2, 2, "")
    assert end["epsilon"] == statement()["epsilon_total"]


def test_a_run_that_stops_fails_or_is_killed_has_an_exit_code_of_its_own(tmp_path, complete):
    def ended(name: str) -> tuple[str, int]:
        folder = tmp_path / name
        return read_status(folder)["status"], invoke("flower", "status", folder).exit_code

    start(tmp_path / "budget", Nodes(THREE), rounds=3, budget=1e-6)
    assert ended("budget") == ("stopped", 3)
    with pytest.raises(RoundFailed):
        start(tmp_path / "few", Nodes({1: 0}), rounds=1, min_reply_fraction=1.0)
    assert ended("few") == ("failed", 3)
    assert "1 of 3 nodes were connected" in read_status(tmp_path / "few")["reason"]
    assert ended("run") == ("completed", 0)
    exact = read_status(complete)["epsilon"]
    assert f"The run is completed: 1 of 1 rounds, epsilon {exact:.4g}.\n" == invoke("flower", "status", complete).output
    assert json.loads(invoke("flower", "status", "--json", complete).output)["epsilon"] == exact
    kill(complete)
    assert ended("run") == ("killed", 4)
    (complete / "status.json").write_text('{"status": "completed"}')
    assert "can't be read" in str(invoke("flower", "status", complete).exception)


def test_a_listed_node_is_asked_and_no_other_and_the_list_is_bound_to_the_run(tmp_path):
    """The attack: a fourth node with a lower id is connected from the start, and later a place is empty."""
    listed = tmp_path / "nodes"
    listed.write_text("10\n11\n12\n")
    grid = Nodes({1: 5, 10: 0, 11: 1, 12: 2}, {2: {1: 5, 10: 0, 12: 2}})
    start(tmp_path / "run", grid, rounds=2, nodes=listed)
    assert grid.asked == [[10, 11, 12], [10, 12]]
    listed.write_text("1\n10\n12\n")
    with pytest.raises(InputError, match=r"nodes is \[1, 10, 12\] here and \[10, 11, 12\] there"):
        start(tmp_path / "run", Nodes({1: 5, 10: 0, 12: 2}), rounds=2, nodes=listed)
    with pytest.raises(InputError, match="names 3, and the run has 4"):
        start(tmp_path / "other", grid, nodes=listed, clients=4)
    everyone = Nodes({1: 5, 10: 0, 12: 2})
    start(tmp_path / "open", everyone, ADD, nodes=listed)
    assert everyone.asked == [[1, 10, 12]]


def test_metrics_are_what_is_public_and_health_follows_the_status_and_damaged_files(tmp_path, complete):
    text = to_text(run_metrics(complete)[0])
    assert "dpfedexp_run_round 1\n" in text
    assert 'dpfedexp_run_status{status="completed"} 1\n' in text
    assert 'dpfedexp_run_clients{what="valid"} 3\n' in text
    start(tmp_path / "hidden", Nodes(THREE), ADD)
    assert "clients" not in to_text(run_metrics(tmp_path / "hidden")[0]), "under add-remove the counts are secret"
    with served(complete) as where:
        assert urllib.request.urlopen(f"{where}/metrics").read().decode() == text
        assert urllib.request.urlopen(f"{where}/healthz").status == 200
        for file, content in (
            ("metrics.jsonl", '{"round": 1, "valid": "x"}\n'),
            ("status.json", '{"status": "running"}'),
            ("status.json", "[]"),
            ("status.json", '{"status": "completed", "round": "a{}", "rounds": null, "epsilon": "1", "delta": 1}'),
        ):
            (complete / file).write_text(content)
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(f"{where}/healthz")
            assert urllib.request.urlopen(f"{where}/metrics").status == 200
        shutil.rmtree(complete)
        for path, code in (("healthz", "503"), ("", "404")):
            with pytest.raises(urllib.error.HTTPError, match=code):
                urllib.request.urlopen(f"{where}/{path}")


def test_guard_show_says_what_was_spent_when_and_by_which_app_and_notices_a_restored_ledger(guard):
    assert guard_summary(guard)["charges"] == 0
    charge(guard)
    yesterday = {path: path.read_bytes() for path in guard.path.parent.iterdir() if path.suffix != ".lock"}
    charge(guard, round=2)
    before = {path: path.read_bytes() for path in guard.path.parent.iterdir()}
    shown = invoke("guard", "show", guard.path)
    assert shown.exit_code == 0
    assert re.match(r"2 charges, epsilon \d\.\d+ of 6 at delta 1e-05", shown.output)
    assert "round 2  app abababababab" in shown.output
    summary = json.loads(invoke("guard", "show", guard.path, "--json").output)
    assert (summary["charges"], summary["last"][1]["run"], summary["problem"]) == (2, "11", "")
    assert {path: path.read_bytes() for path in guard.path.parent.iterdir()} == before, "showing changes nothing"
    assert ("dpfedexp_guard_charges", "", 2) in guard_metrics(guard.path)[0]
    for path, content in yesterday.items():
        path.write_bytes(content)
    assert not guard_metrics(guard.path)[1]
    assert "has seen 2 of" in str(invoke("guard", "show", guard.path).exception)


def test_what_a_helper_has_spent_is_shown_as_a_sites_is(tmp_path):
    file = helper_file(tmp_path)
    for number in (1, 2, 3):
        file.admit((round_of(number=number), MECHANISM))
    shown = invoke("guard", "show", file.path)
    spent = compose([(MECHANISM.client_event(), 3)], 1e-5).epsilon
    assert f"3 charges, epsilon {spent:.4f} of 50 at delta 1e-05 (at most 10 a round)" in shown.output
    assert re.search(r"20\d\d-\S+ +run run  round 3", shown.output)
    assert ("dpfedexp_guard_epsilon", "", spent) in guard_metrics(file.path)[0]
    file.ledger.unlink()
    assert "is missing beside" in str(invoke("guard", "show", file.path).exception)


@pytest.mark.parametrize(
    ("name", "option", "wrong", "sentence", "command"),
    [
        ("guard.toml", None, 0o666, "can be written", "chmod 600"),
        ("guard.ledger.jsonl", None, 0o644, "can be read", "chmod 600"),
        ("guard.anchor.json", None, 0o604, "can be read", "chmod 600"),
        (".", None, 0o777, "can be written", "chmod go-w"),
        ("..", None, 0o775, "can be written", "chmod go-w"),
        ("node", "--auth-supernode-private-key", 0o640, "can be read", "chmod 600"),
        ("runtime.key", "--ssl-keyfile", 0o644, "can be read", "chmod 600"),
        ("superexec", "--superexec-auth-secret-file", 0o644, "can be read", "chmod 640"),
        ("superexec", "--superexec-auth-secret-file", 0o660, "can be written", "chmod 640"),
    ],
)
def test_a_file_that_other_users_can_reach_is_refused_with_the_command_that_closes_it(
    name, option, wrong, sentence, command, guard, monkeypatch
):
    charge(guard)
    for kept in guard.path.parent.iterdir():
        kept.chmod(0o600)
    path = (guard.path.parent / name).resolve()
    path.touch()
    path.chmod(wrong)
    # The group of a file that its maker made is his own; other users are in another one.
    monkeypatch.setattr("os.getegid", lambda: 4711)
    shown = invoke("node", "--guard", guard.path, *([option, path] if option else []))
    close = f"{command} {path}"
    said = f"{str(path)!r} {sentence} by other users of this machine (its mode is {wrong:o}): {close}"
    assert str(shown.exception) == said
    subprocess.run(close, shell=True, check=True)
    check_file(guard.path, 0o600)
    check_file(path, 0o640 if name == "superexec" else 0o755 if path.is_dir() else 0o600)


@pytest.mark.skipif(not (shutil.which("openssl") and shutil.which("ssh-keygen")), reason="needs openssl, ssh-keygen")
def test_the_documented_commands_of_a_site_leave_no_file_that_its_node_refuses(tmp_path):
    """Followed to the letter in a shell with the usual umask; the table for security officers says 0640 and 0600."""
    page = (Path(__file__).parents[2] / "docs" / "operator.md").read_text()
    site = page[page.index("**Every site**") : page.index("From the server's operator the site gets")]
    commands = "\n".join(line for line in site.splitlines() if line.startswith("    "))
    assert "superexec" in commands
    script = "umask 022\n" + commands.replace("dpfedexp-app", str(os.getgid()))
    subprocess.run(["bash", "-ec", script], cwd=tmp_path, check=True, capture_output=True)
    for name, most in (("guard.toml", 0o600), ("node", 0o600), ("runtime.key", 0o600), ("superexec", 0o640)):
        assert (tmp_path / name).stat().st_mode & 0o777 & ~most == 0, name


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--allow-runtime-dependency-installation"], "would let an app bring code"),
        (["--insecure", "--superlink=fl.example.org:9092"], "sends everything to fl.example.org unencrypted"),
        (["--isolation", "process"], "needs --superexec-auth-secret-file"),
        (["--trusted-entities=x.yaml"], "refuses every local app"),
        (["--insec", "--superlink=fl.example.org:9092"], "--insec is short for --insecure"),
        (["--trusted=x.yaml"], "--trusted is short for --trusted-entities"),
    ],
)
def test_options_that_would_open_a_site_are_refused(options, reason, guard):
    assert reason in str(invoke("node", "--guard", guard.path, *options).exception)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give a file away")
def test_a_guard_that_belongs_to_the_apps_user_is_refused(guard):
    """Its mode looks private, and its owner can change it all the same."""
    os.chown(guard.path, 65534, 65534)
    said = str(invoke("node", "--guard", guard.path).exception)
    assert "guard.toml' belongs to another user (id 65534)" in said


def test_an_enforcing_node_needs_a_list_of_apps(guard):
    guard_file(guard.path.parent)
    assert "lists no apps" in str(invoke("node", "--guard", guard.path).exception)


def test_a_relative_folder_is_meant_from_where_the_user_is(tmp_path, own_app):
    def paths(*settings: str) -> dict[str, str]:
        return paths_from_here(own_app, read_overrides(settings), tmp_path)

    assert paths() == {"federation.folder": str(tmp_path / "runs" / "first")}
    assert paths('federation.rounds=2 federation.folder="a b"') == {"federation.folder": str(tmp_path / "a b")}
    several = ('federation.folder="/a"', "federation.rounds=2", 'federation.folder="/b"')
    assert paths(*several) == {"federation.folder": "/b"}
    with pytest.raises(InputError, match=r"has no readable pyproject\.toml. `dpfedexp flower new` writes an app"):
        paths_from_here(tmp_path, {}, tmp_path)
    (tmp_path / "pyproject.toml").touch()
    with pytest.raises(InputError, match="is not an app of dpfedexp"):
        paths_from_here(tmp_path, {}, tmp_path)
    assert paths('federation.nodes="nodes.pub"')["federation.nodes"] == str(tmp_path / "nodes.pub")
    for wrong in ("nonsense", "a.b=", "a.b=1 a.b=2"):
        with pytest.raises(InputError, match=f"a setting is {wrong!r}; write settings as"):
            paths(wrong)


def test_there_is_a_node_for_each_file_and_no_other_node_gets_its_path(tmp_path, monkeypatch):
    for name in ("b.csv", "a.csv", ".hidden"):
        (tmp_path / name).touch()
    files = _files_of_nodes(tmp_path)
    assert [path.name for path in files] == ["a.csv", "b.csv"]
    settings = {number: {"data": str(path)} for number, path in enumerate(files)}
    deployment, started = Deployment(tmp_path / "up", 2, node_config=settings), []
    deployment.port = 9092
    deployment.folder.mkdir()
    deployment.make_keys()
    keys = deployment.node_list.read_text()
    deployment.make_keys()  # as `flower up` does after `flower down`: a run is bound to its nodes' keys
    assert deployment.node_list.read_text() == keys
    monkeypatch.setattr(deployment, "_spawn", lambda command, _: started.append(command))
    for index in range(2):
        deployment.start_supernode(index)
    configs = [command[command.index("--node-config") + 1] for command in started]
    assert [[f'data="{path}"' in config for path in files] for config in configs] == [[True, False], [False, True]]
    (tmp_path / "empty").mkdir()
    for wrong, reason in (("empty", "is empty"), ("a.csv", "is not a folder"), ("nowhere", "is not a folder")):
        with pytest.raises(InputError, match=f"{reason}.* one file or folder for each node"):
            _files_of_nodes(tmp_path / wrong)


def test_a_run_takes_its_nodes_from_the_deployment_that_is_up(tmp_path, own_app, monkeypatch):
    streamed = []
    with pytest.raises(InputError, match="no nodes are up for this app; start them"):
        run_app(own_app)
    monkeypatch.setattr("dpfedexp.flower.app._stream", lambda *given: streamed.append(given[:2]))
    monkeypatch.setattr(Deployment, "start", lambda self: None)
    place = own_app / ".up"
    deployment = Deployment(place, 5)
    with running(deployment):
        with pytest.raises(InputError, match="are up already"), running(Deployment(place, 5)):
            pass
        assert run_app(own_app, settings=[f'federation.folder="{tmp_path / "run"}"']) == 2
        assert find_running(place)["nodes"] == 5
    assert find_running(place) is None
    command, environment = streamed[0]
    settings = read_overrides([command[-1]])
    assert settings["federation.clients"] == 5
    assert settings["federation.nodes"] == str(deployment.node_list)
    assert environment["FLWR_HOME"] == str(deployment.home)
    with pytest.raises(InputError, match="no nodes are up"):
        run_app(own_app)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("federation.roundz=3", "federation.roundz is not a setting. Did you mean 'rounds'"),
        ('federation.epsilon="eight"', "federation.epsilon is 'eight'; it must be"),
        ("federation.node_timeout=9.5", r"write node_timeout = 9.5 under \[tool.flwr.app.config.federation\]"),
        ("epsilon=3", "epsilon is not a setting. Did you mean 'federation.epsilon'"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_is_started(setting, reason, own_app):
    with pytest.raises(InputError, match=reason):
        run_app(own_app, "up", [setting])


def test_processes_of_a_deployment_whose_own_process_was_killed_are_ended(tmp_path):
    deployment = Deployment(tmp_path, 1)
    left = deployment._spawn([sys.executable, "-c", "import time; time.sleep(1000)"], "left")
    try:
        (tmp_path / "up.json").write_text(json.dumps({"mark": deployment.mark}))
        # Linux shows the environment of a new program a moment after it began.
        while not processes_of(deployment.mark):
            time.sleep(0.01)
        assert stop_running(tmp_path)
        assert left.wait(60) == -signal.SIGKILL
        assert not stop_running(tmp_path)
    finally:
        left.kill()
        left.wait()


def test_a_run_whose_nodes_are_stopped_says_how_it_goes_on(own_app, complete, monkeypatch, capsys):
    """Flower says that the SuperLink can't be reached, in a box that hid what happened."""
    logs, status, killed = own_app / ".up", complete / "status.json", kill(complete)
    status.unlink()
    script = f"import pathlib; print('Successfully started run 7'); pathlib.Path({str(logs / DOWN)!r}).touch()"
    script += f"; pathlib.Path({str(status)!r}).write_text({killed!r}); print('SuperLink is unavailable')"
    stream = flower_app._stream
    monkeypatch.setattr(flower_app, "_own_deployment", lambda *_: ({}, logs, logs))
    monkeypatch.setattr(flower_app, "_flowers_status", lambda *_: "unknown")
    monkeypatch.setattr(flower_app, "_stream", lambda _, *given: stream([sys.executable, "-uc", script], *given))
    assert run_app(own_app, None, [f'federation.folder="{complete}"']) == 4
    said = capsys.readouterr().out
    assert flower_app.STOPPED in said
    assert "Run 7 killed: 1 of 1 rounds" in said


def test_an_apps_hash_is_of_its_source_and_settings_whatever_else_lies_in_its_folder(tmp_path, own_app):
    before = app_hash(own_app)
    for name in ("guard.toml", "guard.ledger.jsonl", "runs/flower/status.json"):
        (own_app / name).parent.mkdir(parents=True, exist_ok=True)
        (own_app / name).write_text("{}")
        assert app_hash(own_app) == before, name
    for name in ("pyproject.toml", "federation/task.py"):
        with (own_app / name).open("a") as file:
            file.write("\n[more]\n")
        assert app_hash(own_app) != before, name
    with pytest.raises(InputError, match="is not a Flower app"):
        app_hash(tmp_path)


def test_a_folder_with_a_complete_run_is_refused_at_once_and_an_unfinished_one_goes_on(
    tmp_path, own_app, complete, monkeypatch
):
    monkeypatch.setattr("dpfedexp.flower.app._stream", lambda *_: None)
    taken = f'federation.folder="{complete}"'
    with pytest.raises(InputError, match=r"holds a complete run; name a new one for another run \(--folder"):
        run_app(own_app, "up", [taken])
    kill(complete)
    assert run_app(own_app, "up", [taken]) == 2
    with Ledger.open(complete / "ledger.jsonl"), pytest.raises(InputError, match="a run that is not over"):
        run_app(own_app, "up", [taken])
    assert run_app(own_app, "up", [f'federation.folder="{tmp_path / "new"}"']) == 2


def test_a_superlink_that_does_not_answer_leaves_what_the_folder_tells(tmp_path, complete, monkeypatch):
    """On an overloaded machine `flwr list` takes longer than anybody waits."""
    monkeypatch.setattr("dpfedexp.flower.app.program", str)
    monkeypatch.setattr(subprocess, "run", Mock(side_effect=subprocess.TimeoutExpired("flwr", 60)))
    assert flower_app._final_status(complete, "up", "7", {}, {})[0] == "completed"
    assert flower_app._final_status(tmp_path / "elsewhere", "up", "7", {}, {}) == ("failed", {})
    monkeypatch.setattr("dpfedexp.flower.app._flowers_status", lambda *given: "finished:failed")
    status, told = flower_app._final_status(complete, "up", "7", {}, read_status(complete))
    assert (status, told["reason"]) == ("failed", ""), "the reason of an earlier run is not this one's"


@pytest.mark.parametrize(
    ("wrong", "right", "reason"),
    [
        ("import numpy", "import nonumpy", "line 3: importing it failed: ModuleNotFoundError: .*nonumpy"),
        ("nn.Linear(4, 1)", "nn.Linaer(4, 1)", r"line 12: build_model\(\) failed: AttributeError: .*Linaer"),
        ("skiprows=1", "skiprows=0", r"line 17: load_data\('.*node0.csv'\) failed: ValueError: could not convert"),
        ("nn.Linear(4, 1)", "nn.Linear(3, 1)", "training on '.*node0.csv' failed: .*4"),
    ],
)
def test_up_tries_the_task_before_it_starts_anything(wrong, right, reason, own_app, monkeypatch):
    started = Mock()
    monkeypatch.setattr("dpfedexp.cli.flower._start_in_background", started)
    shown = invoke("flower", "up", own_app)
    assert "A server and 3 nodes are up" in shown.output, shown.exception
    task = own_app / "federation" / "task.py"
    assert wrong in task.read_text()
    task.write_text(task.read_text().replace(wrong, right))
    assert re.search(rf"task.py'.*{reason}", str(invoke("flower", "up", own_app).exception))
    started.assert_called_once()


LOG = """INFO : Round 1 of 2
Traceback (most recent call last):
  File "/apps/1/federation/task.py", line 7, in build_model
    return nn.Linaer(4, 1)
AttributeError: no Linaer

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/apps/1/federation/task.py", line 9, in load_data
    raise
  File "/lib/dpfedexp/trainers/task.py", line 3, in check
dpfedexp.errors.InputError: the rows do not fit
Successfully started run 17
"""


def test_a_failed_run_prints_the_error_in_a_sentence_and_the_rest_is_in_its_log(tmp_path, own_app, capfd):
    log = tmp_path / "run.log"
    command = [sys.executable, "-c", f"print({LOG!r}, end='')"]
    assert flower_app._stream(command, os.environ, tmp_path, log) == "17"
    assert log.read_text() == LOG
    printed = [line for line in capfd.readouterr().out.splitlines() if line]
    assert printed == ["INFO : Round 1 of 2", "Successfully started run 17"]
    flower_app._show_failures(own_app, {log: 0})
    assert capfd.readouterr().out == f"Error: federation/task.py, line 9: the rows do not fit\n  The whole log: {log}\n"
