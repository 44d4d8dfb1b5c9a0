"""A deployment that crashed anywhere ends, once resumed, where a whole one does, over the ledger that paid for its checkpoint.

The engine's own tests of folders, ledgers and anchors (`engine/test_resume.py`, `engine/test_one_writer.py`) hold here too.
"""

import itertools
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from dpfedexp.algorithms import cdp_fedexp, dp_fedavg, ldp_fedexp
from dpfedexp.core import step_size
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.engine.private_folder import SharedAnchor
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import LedgerError
from tests.engine.small import Crash, entries
from tests.optimizers import Adagrad
from tests.sizes import sized

from .loopback import Silence, deploy, dying_at, grid_of, stop_after

CDP = cdp_fedexp(clip="adaptive", noise_multiplier=1.0)
LDP = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
PLAIN = dp_fedavg(clip=0.5, noise_multiplier=1.0)
pytestmark = pytest.mark.usefixtures("silent")


def run(folder, algorithm=CDP, rounds=4, crash_at=None, watch=None):
    """`crash_at`: the server dies while it waits for the replies of this round."""

    def lost(message, reply):
        if message.metadata.group_id == str(crash_at) and message.metadata.dst_node_id == 3:
            raise Crash
        return reply

    grid = grid_of(reply_of=lost, serialize=False)
    return deploy(folder, algorithm, grid, rounds=rounds, noise=Silence, on_round=watch)


def rounds_in(folder) -> list[int]:
    return [entry.round for entry in entries(folder)]


KILLED = {
    "adaptive clip, an optimizer of one's own": (replace(CDP, server=Adagrad(floor=0.5)), 4),
    "safe step": (cdp_fedexp(clip=0.5, noise_multiplier=1.0), 7),
}


@pytest.mark.parametrize("name", KILLED)
def test_a_run_killed_while_it_waits_resumes_to_the_same_model_memory_and_ledger(name, tmp_path):
    algorithm, last = KILLED[name]
    given = {"algorithm": algorithm, "rounds": last}
    whole, expected = run(tmp_path / "whole", **given)
    with pytest.raises(Crash):
        run(tmp_path / "killed", **given, crash_at=3)
    assert rounds_in(tmp_path / "killed") == [1, 2]
    assert outcome(verify_run(tmp_path / "killed")) == "incomplete"
    resumed, result = run(tmp_path / "killed", **given)
    rounds = list(range(1, last + 1))
    assert rounds_in(tmp_path / "killed") == rounds_in(tmp_path / "whole") == rounds
    assert torch.equal(resumed.state.w, whole.state.w)
    assert torch.equal(resumed.state.reported, whole.state.reported)
    assert resumed.state.radius == whole.state.radius
    for kept, other in ((whole.state.memory, resumed.state.memory), (whole.state.server, resumed.state.server)):
        assert all(torch.equal(other[key], value) for key, value in kept.items())
    shown, before = ([dict(one.train_metrics_clientapp[n]) for n in rounds] for one in (result, expected))
    assert shown == before, "history survives"
    steps = {line["eta_g"] for line in shown[2:]}
    assert name != "safe step" or steps - {1.0, step_size.FIRST_CAP}, "the memory must matter for the comparison"


def test_a_local_round_that_was_sent_before_the_crash_stays_charged(tmp_path):
    """Its reports had left the clients; asking again draws new noise and costs again."""
    with pytest.raises(Crash):
        run(tmp_path, LDP, crash_at=3)
    run(tmp_path, LDP)
    assert rounds_in(tmp_path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("algorithm", [CDP, LDP], ids=["central", "local"])
def test_a_charged_run_without_its_checkpoint_is_refused_and_charges_nothing_more(algorithm, tmp_path):
    """Made again from the start, its rounds would draw new noise, on top of what the first ones released."""
    with pytest.raises(Crash):
        run(tmp_path, algorithm, crash_at=3)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(LedgerError, match="its checkpoint is missing, so it can't be resumed"):
        run(tmp_path, algorithm)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before


def test_a_crash_at_any_write_leaves_no_release_uncharged_and_no_lock(tmp_path, monkeypatch):
    """Every write to disk of a run in turn is the last one that happens."""
    rounds = sized(1, 2)
    for write in itertools.count(1):
        place, shown = tmp_path / str(write), [0]
        with dying_at(write, monkeypatch) as left:
            run(place, PLAIN, rounds, watch=lambda record, shown=shown: shown.append(record["round"]))
        if left[0] > 0:
            break
        charged = len(entries(place)) if (place / "ledger.jsonl").exists() else 0
        assert charged >= max(shown)
        resumed, _ = run(place, PLAIN, rounds)
        assert resumed.state.round == rounds
        assert len(resumed.opened.ledger.entries) >= rounds
    assert write > 6 * rounds, "every charge has a head and an anchor, every round two files"


def test_no_client_is_asked_for_a_local_report_when_the_anchor_cannot_be_moved(tmp_path, monkeypatch):
    """What was charged stays charged."""
    full = Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched, pytest.raises(LedgerError, match="round 2 can't be charged: No space left"):
        run(tmp_path, LDP, watch=lambda record: patched.setattr(SharedAnchor, "remember", full))
    assert read_progress(tmp_path).round == 1
    assert len(entries(tmp_path)) == 2
    run(tmp_path, LDP)
    assert len(entries(tmp_path)) == 5


def test_a_run_does_not_go_on_without_its_anchor(tmp_path, monkeypatch):
    run(tmp_path / "run", watch=stop_after(2))
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "another machine"))
    with pytest.raises(LedgerError, match="is missing, so an older copy of the folder would go unnoticed"):
        run(tmp_path / "run")
