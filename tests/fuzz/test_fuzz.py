"""Every fuzzer for a few seconds; `python -m tests.fuzz.<name> --minutes 10` is the same for longer."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import harness
from tests.sizes import sized

TARGETS = ("toml", "idx", "ledger", "checkpoint", "replies", "command_line")
SECONDS = sized(2, 20)


@pytest.mark.parametrize("name", TARGETS)
def test_hostile_input_gets_a_sentence(name):
    done = subprocess.run(
        [sys.executable, "-m", f"tests.fuzz.{name}", "--seconds", str(SECONDS)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=SECONDS + 180,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Timeout" not in done.stderr
    assert "Done" in done.stderr or "without a finding" in done.stdout


def test_no_swap_of_ledgers_heads_checkpoints_and_anchors_loses_a_charge():
    """A few of the ten thousand that `python -m tests.fuzz.swaps` tries."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.swaps", "--cases", str(sized(100, 400))],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "no charge lost" in done.stdout


def test_every_fuzzer_is_in_the_list():
    here = Path(__file__).parent
    others = {"__init__", "harness", "swaps", "programs", "program_parts", "test_fuzz", "test_hostile"}
    assert {path.stem for path in here.glob("*.py")} - others == set(TARGETS)


def test_a_finding_is_found():
    """A parser that fails on one byte in a header: the plain mutation finds it within seconds."""

    def fragile(data: bytes) -> None:
        if data[:1] == b"\xff":
            raise KeyError

    with pytest.raises(KeyError):
        harness._mutate(fragile, [b"abcd"], 20.0, 0)
