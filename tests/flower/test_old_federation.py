"""Server folders and guards of the version before go on as if they had begun today."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from dpfedexp.accounting import Ledger
from dpfedexp.accounting.compose import compose
from dpfedexp.flower.node import mod
from dpfedexp.flower.server.checkpoint import VERSION, load_checkpoint
from dpfedexp.runs.file_names import LEDGER, SERVER_CHECKPOINT
from dpfedexp.runs.verify import verify_run

from .old_federation import ALGORITHMS, ANSWERS, MECHANISM
from .test_agreement import Silence
from .test_mod import ask
from .test_resume import run

OLD = Path(__file__).parent / "old" / "0.1.0-e363675"


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """A copy of the old folders, whose private folder is its owner's alone, as git does not keep it."""
    place = tmp_path / "old"
    shutil.copytree(OLD, place)
    for path in (place / "private").rglob("*"):
        os.chmod(path, 0o700 if path.is_dir() else 0o600)
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(place / "private"))
    monkeypatch.setattr(mod, "deployment_noise", Silence)
    return place


def rounds_in(folder: Path) -> list[int]:
    return [entry.round for entry in Ledger.open(folder / LEDGER, read_only=True).entries]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_servers_run_of_the_version_before_ends_like_one_of_today(name, old, tmp_path):
    assert json.loads((old / name / SERVER_CHECKPOINT).read_text())["version"] == 2
    before = rounds_in(old / name)
    resumed, _ = run(old / name, ALGORITHMS[name], resume=True)
    whole, _ = run(tmp_path / "whole", ALGORITHMS[name])
    # Clients train in float32 on data with last bits of their own, so the first rounds, which another machine computed, agree to a
    # few times 6e-8, and the rounds after them make more of it.
    assert torch.allclose(resumed.state.w, whole.state.w, rtol=1e-4, atol=1e-5)
    assert len(resumed.state.recent) == len(whole.state.recent)
    assert torch.equal(resumed.state.recent[-1], resumed.state.w)
    assert [record["round"] for record in resumed.history] == [1, 2, 3, 4]
    # In local privacy the third round was charged before its reports were asked for, and is paid for again with its new noise.
    assert rounds_in(old / name) == [*before, 3, 4]
    assert json.loads((old / name / SERVER_CHECKPOINT).read_text())["version"] == VERSION
    assert [check.name for check in verify_run(old / name) if not check.passed] == []


def test_a_servers_finished_run_of_the_version_before_verifies_and_asks_nobody(old):
    assert [check.name for check in verify_run(old / "finished") if not check.passed] == []
    again, _ = run(old / "finished", ALGORITHMS["central"], resume=True)
    assert again.state.round == 4
    assert rounds_in(old / "finished") == [1, 2, 3, 4]


def test_the_newest_iterate_that_the_version_before_wrote_twice_is_read_once(old):
    state = load_checkpoint(old / "central").state
    assert len(state.recent) == 2
    assert torch.equal(state.recent[-1], state.w)
    assert not torch.equal(state.recent[0], state.w)


def test_a_guards_ledger_of_the_version_before_counts_on(old):
    node = {"dpfedexp-guard": str(old / "guard" / "guard.toml")}
    event = MECHANISM.client_event()
    affordable = max(n for n in range(1, 50) if compose([(event, n)], 1e-5).epsilon <= 9.0)
    assert affordable > ANSWERS
    for number in range(ANSWERS + 1, affordable + 1):
        assert not ask(MECHANISM, node, round=number).has_error()
    refused = ask(MECHANISM, node, round=affordable + 1)
    assert "above its max_epsilon_total of 9" in refused.error.reason
    assert len(Ledger.open(old / "guard" / "guard.ledger.jsonl", read_only=True)) == affordable
