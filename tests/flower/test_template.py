"""The app that `dpfedexp flower new` writes, on `dpfedexp flower up`, and an app simulated by Flower."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from dpfedexp.accounting import Ledger
from dpfedexp.cli import app as cli
from dpfedexp.cli import main
from dpfedexp.errors import InputError
from dpfedexp.flower import strategy_from
from dpfedexp.flower.app import _app_config, app_hash, new_app
from dpfedexp.flower.local_deployment import QUIET, free_port, processes_of
from tests.engine.small import entries
from tests.sizes import long

from .app_folder import (
    ALMOST_NO_NOISE,
    FLOWER,
    LOCAL,
    PATIENCE,
    QUICK,
    assert_first_round_is_the_simulators,
    make_app,
    run_in,
    wait_until,
)

BIN = Path(sys.executable).parent


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **QUIET, **QUICK, **more}


def belonging_to(home: Path) -> list[int]:
    return processes_of(str(home), "FLWR_HOME")


@contextlib.contextmanager
def ended(home: Path) -> Iterator[None]:
    """Leaves no process behind, whatever fails."""
    try:
        yield
    finally:
        for pid in belonging_to(home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def test_the_app_is_a_few_small_files_that_the_library_understands(tmp_path):
    written = new_app(tmp_path / "My App")
    names = {"README.md", "pyproject.toml", "__init__.py", "server_app.py", "client_app.py", "task.py"}
    names |= {"node0.csv", "node1.csv", "node2.csv"}
    assert {path.name for path in written} == names
    assert 'name = "my-app"' in (tmp_path / "My App" / "pyproject.toml").read_text()
    strategy = strategy_from(_app_config(tmp_path / "My App"))
    assert (strategy.clients, strategy.rounds, strategy.budget) == (3, 50, None)
    with pytest.raises(InputError, match="is not empty"):
        new_app(tmp_path / "My App")


@long
@pytest.mark.usefixtures("alone")
def test_one_round_in_flowers_simulation_equals_one_round_of_ours(tmp_path):
    """`flwr run . local`: Ray, three virtual nodes, as good as no noise."""
    home, out = tmp_path / "home", tmp_path / "out"
    home.mkdir()
    config = '[superlink]\ndefault = "local"\n[superlink.local]\naddress = ":local-in-memory:"\n'
    (home / "config.toml").write_text(config)
    app = make_app(
        tmp_path / "app",
        federation={"rounds": 1, "folder": str(out), "round_timeout": PATIENCE},
        algorithm={"target_epsilon": None, "noise_multiplier": ALMOST_NO_NOISE},
        local=LOCAL,
    )
    ports = {f"FLWR_LOCAL_{name}_API_PORT": str(free_port()) for name in ("SUPERLINK_HTTP", "CONTROL")}
    federation = ["--federation-config", "num-supernodes=3 client-resources-num-cpus=1"]
    with ended(home):
        own = environment(FLWR_HOME=str(home), **ports)
        done = run_in(app, own, "flwr", "run", ".", "local", "--stream", *federation)
        assert (out / "checkpoint.safetensors").exists(), done.stdout + done.stderr
        assert_first_round_is_the_simulators(load_file(out / "checkpoint.safetensors")["w"])
        assert len(entries(out)) == 1
        assert "Privacy of cdp_fedexp" in (out / "privacy.txt").read_text()
    wait_until(lambda: not belonging_to(home), "the end of Flower's processes")


@long
@pytest.mark.usefixtures("alone")
def test_up_run_and_down_as_a_user_types_them(tmp_path):
    """One node that answers for 40 clients and enforces a guard file, for one round."""
    guard, out, data = tmp_path / "guard.toml", tmp_path / "out", tmp_path / "app" / "data"
    app = make_app(
        tmp_path / "app",
        federation={"clients_per_node": 40, "rounds": 1, "round_timeout": PATIENCE, "folder": str(out)},
        # A sum of 40 clients moves 40 times as far as one client's update, and the guard charges for that.
        algorithm={"target_epsilon": None, "noise_multiplier": 60.0},
        local=LOCAL,
    )
    for name in ("node1.csv", "node2.csv"):
        (data / name).unlink()
    guard.write_text(
        "max_epsilon_per_round = 9\nmax_epsilon_total = 9\ndelta = 1e-5\nmechanisms = ['central-gaussian']\nmax_clip = 1.0\n"
    )
    home = app / ".up" / "flwr-home"
    with ended(home):
        shown = run_in(app, environment(), *FLOWER, "up", "--guard", guard)
        assert "A server and 1 nodes are up" in shown.stdout, shown
        assert "are up already" in _in_process(app, "up")
        shown = run_in(app, environment(), *FLOWER, "run").stdout
        assert "asked 40, valid 40" in shown, shown
        assert "against its operator: the node sees their reports" in (out / "privacy.txt").read_text()
        assert float(torch.linalg.vector_norm(load_file(out / "checkpoint.safetensors")["w"])) > 0
        assert len(Ledger.open(tmp_path / "guard.node0.ledger.jsonl", read_only=True)) == 1
        assert app_hash(app) in (tmp_path / "guard.node0.toml").read_text()
        assert "Stopped" in _in_process(app, "down")
        assert belonging_to(home) == [], "`down` must stop everything that `up` started"
        assert "No nodes are up" in _in_process(app, "down")


def _in_process(folder: Path, word: str) -> str:
    """What a command says that starts no process."""
    done = CliRunner().invoke(cli, ["flower", word, str(folder)], env=environment())
    return f"{done.output}{done.exception}"


def test_ctrl_c_ends_a_command_with_the_exit_status_of_a_shell():
    with pytest.raises(SystemExit, match="130"):
        main(Mock(side_effect=KeyboardInterrupt))
