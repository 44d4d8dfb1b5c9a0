"""A run goes on only over the ledger that paid for what its checkpoint holds."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest

from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import dp_fedavg, ldp_fedexp
from dpfedexp.engine.checkpoint import read_progress
from dpfedexp.engine.outlets import right
from dpfedexp.engine.private_folder import SharedAnchor
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import LedgerError
from dpfedexp.flower import DpFedExp
from tests.sizes import long

from .loopback import Silence, deploy, dying_at, grid_of, stop_after

CDP = dp_fedavg(clip=0.5, noise_multiplier=1.0)
LDP = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
LEDGER, HEAD, CHECKPOINT = "ledger.jsonl", "ledger.jsonl.head", "checkpoint.safetensors"
pytestmark = pytest.mark.usefixtures("silent")
each_setting = pytest.mark.parametrize("algorithm", [CDP, LDP], ids=["central", "local"])


def run(place, algorithm=CDP, rounds=3, watch=None) -> DpFedExp:
    given = {"rounds": rounds, "noise": Silence, "on_round": watch}
    return deploy(place, algorithm, grid_of(serialize=False), **given)[0]


def book(place) -> Ledger:
    return Ledger.open(place / LEDGER, read_only=True)


@pytest.mark.parametrize("also", [(), (HEAD,), (CHECKPOINT,)])
def test_a_deleted_ledger_beside_a_checkpoint_or_head_is_not_begun_anew(also, tmp_path):
    run(tmp_path)
    for name in (LEDGER, *also):
        (tmp_path / name).unlink()
    with pytest.raises(LedgerError, match=r"ledger.* is missing, so what was charged is unknown"):
        run(tmp_path)
    assert not (tmp_path / LEDGER).exists()


@each_setting
def test_the_whole_folder_put_back_to_an_earlier_moment_is_refused(algorithm, tmp_path):
    """The attack: ledger, head and checkpoint of round 1 agree with each other, so the later rounds would be forgotten."""
    place = tmp_path / "run"
    run(place, algorithm, rounds=4, watch=stop_after(1))
    old = {path.name: path.read_bytes() for path in place.iterdir()}
    run(place, algorithm, rounds=4, watch=stop_after(3))
    for left in place.iterdir():
        left.unlink()
    for name, content in old.items():
        (place / name).write_bytes(content)
    with pytest.raises(LedgerError, match="holds 1 charges and is not the one that had 3 at the last"):
        run(place, algorithm, rounds=4)


@pytest.mark.parametrize(("algorithm", "locks"), [(CDP, True), (LDP, False)], ids=["central", "local without locks"])
def test_of_two_copies_of_a_folder_one_goes_on(algorithm, locks, tmp_path, monkeypatch):
    """Both went on to their ends before: 4 rounds stated by each, 6 spent. Without locks the one that waited is refused."""
    if not locks:
        monkeypatch.setattr("dpfedexp.engine.private_folder.try_lock", lambda descriptor: False)
    one, two = tmp_path / "one", tmp_path / "two"

    def second(record):
        """While the first copy is in its second round."""
        if record["round"] != 2:
            return
        shutil.copytree(one, two)
        if locks:
            with pytest.raises(LedgerError, match="in use by another process, which may have a copy of its folder"):
                run(two, algorithm, rounds=4)
        else:
            run(two, algorithm, rounds=4)

    if locks:
        run(one, algorithm, rounds=4, watch=second)
    else:
        with pytest.raises(LedgerError, match="another copy of the run continued"):
            run(one, algorithm, rounds=4, watch=second)
    winner, loser = (one, two) if locks else (two, one)
    with pytest.raises(LedgerError, match="another copy of the run continued"):
        run(loser, algorithm, rounds=4)
    assert outcome(verify_run(winner)) == "holds"
    assert outcome(verify_run(loser)) == "false"
    assert (len(book(winner)), len(book(loser))) == (4, 2)


@each_setting
def test_nothing_is_released_when_the_anchor_cannot_be_moved(algorithm, tmp_path, monkeypatch):
    """Neither a model nor, in local privacy, a request; what was charged stays charged."""
    place, seen = tmp_path / "run", []

    def full(self, mark):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:

        def watch(record):
            seen.append(record["round"])
            patched.setattr(SharedAnchor, "remember", full)

        with pytest.raises(LedgerError, match="round 2 can't be charged: No space left on device"):
            run(place, algorithm, watch=watch)
    assert seen == [1]
    assert read_progress(place).round == 1
    assert len(book(place)) == 2
    run(place, algorithm)
    assert len(book(place)) == 4


@pytest.mark.parametrize("algorithm", [CDP, pytest.param(LDP, marks=long)], ids=["central", "local"])
def test_a_crash_at_any_write_leaves_no_release_uncharged_and_no_lock(algorithm, tmp_path, monkeypatch):
    """Every write to disk of a run of two rounds in turn is the last one that happens."""
    for write in itertools.count(1):
        place, shown = tmp_path / str(write), [0]
        with dying_at(write, monkeypatch) as left:
            run(place, algorithm, rounds=2, watch=lambda record, shown=shown: shown.append(record["round"]))
        if left[0] > 0:
            break
        charged = len(book(place)) if (place / LEDGER).exists() else 0
        assert charged >= max(shown)
        resumed = run(place, algorithm, rounds=2)
        assert resumed.state.round == 2
        assert len(resumed.opened.ledger.entries) >= 2
    assert write > 12, "every charge has a head and an anchor, every round two files"


def test_the_dates_of_a_deployments_files_do_not_tell_how_long_a_round_took(tmp_path):
    run(tmp_path / "run", rounds=2)
    assert len({path.stat().st_mtime for path in (tmp_path / "run").iterdir()}) == 1
    content = json.loads((tmp_path / "run" / "status.json").read_text())
    assert all(right("status.json", field) not in (None, "nonprivate") for field in content)
