"""`dpfedexp superexec`: Flower's SuperExec, which starts the apps' processes, without core dumps or tokens on command lines.

Flower passes an app's process its token as an argument, which every user of the machine can read. Here it is on standard input.
"""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from dpfedexp.flower.access import check_flower, forbid_core_dumps

_CHILD = "dpfedexp.flower.superexec"
_APP = "flwr-clientapp"
_ARGUMENTS = "runtime_api_address token insecure certificates parent_pid runtime_dependency_install"


def run_superexec(options: Sequence[str]) -> None:
    """Run Flower's SuperExec with these options, until it is stopped."""
    executor: Any = import_module("flwr.supercore.superexec.executor.subprocess_executor")
    apps: Any = import_module("flwr.supernode.runtime.run_clientapp")
    check_flower("superexec", executor.SubprocessExecutor, {"launch": "self spec"})
    check_flower("superexec", apps, {"run_clientapp": _ARGUMENTS})
    executor.SubprocessExecutor.launch = launch
    command: Any = import_module("flwr.supercore.cli.flower_superexec")
    sys.argv = ["flower-superexec", *options]
    command.flower_superexec()


def launch(_: Any, spec: Any) -> Any:
    """Replace Flower's `launch`: start the app's process and write its settings to its standard input."""
    types: Any = import_module("flwr.supercore.superexec.executor.types")
    if spec.task_type != _APP:
        return types.LaunchResult.failed(f"a site runs client apps only, and this is {spec.task_type}.")
    given = {
        "runtime_api_address": spec.runtime_api_address,
        "token": spec.token,
        "insecure": spec.insecure,
        "root_certificates": spec.root_certificates_path,
        "parent_pid": spec.parent_pid,
    }
    process = subprocess.Popen([sys.executable, "-m", _CHILD], stdin=subprocess.PIPE)
    pipe: Any = process.stdin
    with contextlib.suppress(BrokenPipeError), pipe:
        pipe.write(json.dumps(given).encode())
    return types.LaunchResult.accepted()


def run_app() -> None:
    """Run one client app of Flower in this process, with the settings that `launch` writes to its standard input."""
    forbid_core_dumps()
    given = json.load(sys.stdin)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    from flwr.supercore.tls import validate_and_resolve_root_certificates
    from flwr.supernode.runtime.run_clientapp import run_clientapp

    given["certificates"] = validate_and_resolve_root_certificates(given.pop("root_certificates"), given["insecure"])
    run_clientapp(**given)


if __name__ == "__main__":
    run_app()
