"""The template's app with the task of `example_task.py`, other settings, and nodes that misbehave where a test asks for it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import tomli_w
import torch
from torch import Tensor

from dpfedexp.algorithms import cdp_fedexp
from dpfedexp.core.local_optimizer import Sgd
from dpfedexp.data import synthetic_regression
from dpfedexp.engine.train import train
from dpfedexp.flower.app import new_app
from dpfedexp.flower.local_deployment import Deployment, processes_of
from dpfedexp.models import linear_regression

PATIENCE = 900.0
"""Seconds that a deployment may take for anything. Nothing here is about speed, and a busy machine is not a failure."""
QUICK = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "OMP_NUM_THREADS": "1", "DPFEDEXP_DATA": ""}
FLOWER = [sys.executable, "-m", "dpfedexp", "flower"]
LOCAL = {"lr": 0.02, "steps": 10}
ALMOST_NO_NOISE = 1e-9
"""As a multiple of the clip: below the rounding of float32, so that a central round can be compared number by number."""


def assert_first_round_is_the_simulators(w: Tensor) -> None:
    """`w` is the model after one round of the template's app with these settings."""
    algorithm = cdp_fedexp(clip=0.5, noise_multiplier=ALMOST_NO_NOISE)
    clients = synthetic_regression(3, 20).federation
    run = train(linear_regression(20), clients, algorithm, local=Sgd(**LOCAL), rounds=1)
    # The reported model averages the start, which is zero, with the first iterate.
    simulated = 2 * next(iter(run.model.parameters())).detach().double().flatten()
    assert float(simulated.norm()) > 0.1
    torch.testing.assert_close(w, simulated, rtol=2e-5, atol=2e-6)


def make_app(folder: Path, *, hostile: bool = False, own_task: bool = False, **sections: dict) -> Path:
    """`own_task` keeps the template's; `sections` replace or add to the app's configuration; a value of None removes a setting."""
    new_app(folder)
    package, here = folder / "federation", Path(__file__)
    client = package / "client_app.py"
    if not own_task:
        (package / "task.py").write_text(here.with_name("example_task.py").read_text())
        text = client.read_text()
        assert "task.load_data(data_path(context))" in text
        client.write_text(text.replace("task.load_data(data_path(context))", "task.data_of(context)"))
    path = folder / "pyproject.toml"
    content = tomllib.loads(path.read_text())
    config = content["tool"]["flwr"]["app"]["config"]
    if "algorithm" in sections:
        config["federation"].pop("epsilon")
        config["algorithm"] = {"name": "cdp_fedexp", "clip": 0.5, "target_epsilon": 8.0, "delta": 1e-5}
        config["local"] = dict(LOCAL)
    for name, values in sections.items():
        merged = {**config.get(name, {}), **values}
        config[name] = {key: value for key, value in merged.items() if value is not None}
    path.write_text(tomli_w.dumps(content))
    if hostile:
        text = client.read_text()
        changed = text.replace("mods=[private_training]", "mods=[hostile, private_training]")
        assert changed != text
        mod = "from federation.hostile_mod import hostile\n"
        client.write_text(changed.replace("from federation import task\n", f"from federation import task\n{mod}"))
        (package / "hostile_mod.py").write_text(here.with_name("hostile_mod.py").read_text())
    return folder


def run_in(folder: Path, environment: dict[str, str], *command: object, patience: float = PATIENCE):
    """What a command printed, and its exit status."""
    return subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patience,
    )


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def run_app(app: Path, environment: dict[str, str], *options: str, connection: str = "up", patience: float = PATIENCE):
    """`dpfedexp flower run` in the app's folder, to its end."""
    return run_in(app, environment, *FLOWER, "run", ".", connection, *options, patience=patience)


def start_app(app: Path, environment: dict[str, str], *options: str) -> subprocess.Popen:
    """`dpfedexp flower run` in the app's folder, its output in `run.log` there."""
    with open(app / "run.log", "ab") as log:
        given = {"cwd": app, "env": environment, "stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return subprocess.Popen([*FLOWER, "run", ".", "up", *options], **given)


def finish(process: subprocess.Popen, app: Path) -> str:
    """The log of an app that was started, once it has ended."""
    try:
        process.wait(PATIENCE)
    finally:
        process.kill()
        process.wait()
    return (app / "run.log").read_text()


def server_apps(deployment: Deployment) -> list[int]:
    """The ids of the server app's processes."""
    found = []
    for pid in processes_of(deployment.mark):
        with contextlib.suppress(OSError):
            if "flwr-serverapp" in Path(f"/proc/{pid}/cmdline").read_text():
                found.append(pid)
    return found


def kill_server_app(deployment: Deployment) -> None:
    for pid in server_apps(deployment):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_until(condition, what: str, process: subprocess.Popen | None = None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, f"the process ended before {what}"
        assert time.monotonic() < deadline, f"{what} did not happen within {PATIENCE:g} seconds"
        time.sleep(0.1)
