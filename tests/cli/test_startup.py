"""What the command line imports: one process runs the commands one after the other and lists its modules after each."""

import json
import subprocess
import sys
from typing import get_args, get_type_hints

from dpfedexp.accounting.events import ADJACENCIES, Sampling
from dpfedexp.cli.privacy import RoundOptions
from dpfedexp.mechanisms.privunit import GammaRule

SLOW = {"torch", "scipy", "numpy", "matplotlib", "pydantic", "flwr", "dp_accounting", "jinja2", "safetensors", "mpmath"}
OF_THE_CLOSED_FORM = {"numpy", "scipy"}
SLOW_ROOMS_OF_SCIPY = {f"scipy.{room}" for room in ("stats", "signal", "integrate")}

LOADED = """
import contextlib, io, json, sys
from dpfedexp.cli import app
for command in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        app(command.split(), standalone_mode=False)
    print(json.dumps([command, shown.getvalue(), list(sys.modules)]))
"""

HELP = [
    "--help",
    *(f"{name} --help" for name in ("demo", "train", "init", "plan", "report", "privacy", "flower", "audit")),
    *(f"privacy {name} --help" for name in ("epsilon", "noise", "explain", "verify")),
    *("flower new --help", "flower up --help"),
]
CLOSED_FORM = {
    "privacy epsilon -z 5 -T 50": "15.4562",
    "privacy epsilon --mechanism local-gaussian -z 0.7 -M 1000": "15.65",
    "privacy epsilon --mechanism privunit -T 50": "6.0000",
    "privacy noise -e 8 -T 50": "8.0000",
}


def test_help_imports_nothing_slow_and_accounting_without_sampling_special_functions_and_roots_alone():
    program = [sys.executable, "-c", LOADED, json.dumps([*HELP, *CLOSED_FORM])]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        command, shown, modules = json.loads(line)
        assert CLOSED_FORM.get(command, "Usage:") in shown, command
        assert SLOW.intersection(modules) == (OF_THE_CLOSED_FORM if command in CLOSED_FORM else set()), command
        assert SLOW_ROOMS_OF_SCIPY.isdisjoint(modules), command


def test_the_choices_that_flags_offer_are_those_of_the_rooms():
    offered = {name: get_args(hint) for name, hint in get_type_hints(RoundOptions).items()}
    assert set(offered["adjacency"]) == set(ADJACENCIES)
    assert all(Sampling(kind, 0.5).rate == 0.5 for kind in offered["sampling"])
    assert set(offered["gamma"]) <= set(get_args(GammaRule))
