"""A run goes on only over the ledger that paid for what its checkpoint holds."""

from __future__ import annotations

import itertools
import json
import shutil

import pytest
from flwr.app import ConfigRecord

from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import dp_fedavg, ldp_fedexp
from dpfedexp.engine.outlets import right
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.flower import DpFedExp
from dpfedexp.flower import store as folder
from dpfedexp.flower.store import open_folder
from tests.sizes import long

from .loopback import ArrayRecord, Silence, deploy, dying_at, grid_of, problem

CDP = dp_fedavg(clip=0.5, noise_multiplier=1.0)
LDP = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
LEDGER, HEAD, CHECKPOINT = "ledger.jsonl", "ledger.jsonl.head", "checkpoint.json"
pytestmark = pytest.mark.usefixtures("silent")
each_setting = pytest.mark.parametrize("algorithm", [CDP, LDP], ids=["central", "local"])


def run(place, algorithm=CDP, rounds=3, resume=False, watch=None) -> DpFedExp:
    given = {"rounds": rounds, "resume": resume, "noise": Silence, "evaluate_fn": watch}
    return deploy(place, algorithm, grid_of(serialise=False), **given)[0]


def book(place) -> Ledger:
    return Ledger.open(place / LEDGER, read_only=True)


def snapshot(place) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


def restore(place, files: dict[str, bytes], *names: str) -> None:
    for name in names:
        (place / name).write_bytes(files[name])


@pytest.fixture
def unanchored(monkeypatch):
    """What the folder itself can tell, without the anchor outside it."""
    monkeypatch.setattr(folder, "_anchored", lambda ledger, path: ledger)


def epsilon(place) -> float:
    return book(place).guarantee(1e-5).epsilon


def test_charges_and_checkpoint_name_the_run(tmp_path):
    strategy = run(tmp_path)
    entries = book(tmp_path).entries
    content = json.loads((tmp_path / CHECKPOINT).read_text())
    assert {entry.run for entry in entries} == {content["run"]} == {strategy.run}
    assert content["ledger"]["count"] == 3
    assert run(tmp_path, rounds=4, resume=True).run == strategy.run
    assert run(tmp_path / "other").run != strategy.run


@each_setting
def test_a_ledger_older_than_the_checkpoint_is_refused_with_its_own_head_too(algorithm, tmp_path):
    """What was shown: ε fell from 5.76 to 1.56 when an old ledger and its head were put under a new checkpoint."""
    run(tmp_path, algorithm, rounds=1)
    old, spent = snapshot(tmp_path), epsilon(tmp_path)
    run(tmp_path, algorithm, rounds=3, resume=True)
    new = snapshot(tmp_path)
    restore(tmp_path, old, LEDGER, HEAD)
    assert epsilon(tmp_path) == spent
    with pytest.raises(LedgerError, match=r"older than the checkpoint .* holds 1 charges, and there were 3 .* back-up"):
        run(tmp_path, algorithm, rounds=4, resume=True)
    restore(tmp_path, new, LEDGER, HEAD)
    run(tmp_path, algorithm, rounds=4, resume=True)
    assert epsilon(tmp_path) > spent


@pytest.mark.parametrize(("also", "left"), [((), CHECKPOINT), ((HEAD,), CHECKPOINT), ((CHECKPOINT,), HEAD)])
def test_a_deleted_ledger_beside_a_checkpoint_or_head_is_not_begun_anew(also, left, tmp_path):
    run(tmp_path)
    for name in (LEDGER, *also):
        (tmp_path / name).unlink()
    for resume in (True, False):
        with pytest.raises(LedgerError, match=rf"ledger\.jsonl is missing beside {left}.*restore it from a back-up"):
            run(tmp_path, rounds=4, resume=resume)
    assert not (tmp_path / LEDGER).exists()


def test_a_ledger_that_took_another_way_from_the_same_start_is_refused(tmp_path, unanchored):
    """Both ledgers begin with the same round and have the same length, but the checkpoint's later rounds are in one only."""
    run(tmp_path, rounds=1)
    fork = snapshot(tmp_path)
    run(tmp_path, rounds=3, resume=True)
    ours = snapshot(tmp_path)
    for name, content in fork.items():
        (tmp_path / name).write_bytes(content)
    run(tmp_path, rounds=3, resume=True)
    restore(tmp_path, ours, CHECKPOINT, "round-3.safetensors")
    with pytest.raises(LedgerError, match="not of the same history"):
        run(tmp_path, rounds=4, resume=True)


def test_charges_of_other_runs_do_not_pay_for_this_one(tmp_path, monkeypatch):
    original = Ledger.charge

    def charge(self, round, event, *, run="", noise=None):
        return original(self, round, event, run="elsewhere" if round == 3 else run, noise=noise)

    monkeypatch.setattr(Ledger, "charge", charge)
    run(tmp_path)
    with pytest.raises(LedgerError, match="holds no charge for round 3"):
        run(tmp_path, rounds=4, resume=True)


@pytest.mark.parametrize("version", [7, None])
def test_a_checkpoint_of_another_version_is_one_sentence(tmp_path, version):
    run(tmp_path)
    path = tmp_path / CHECKPOINT
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": version}))
    with pytest.raises(
        InputError, match=f"has version {version}, and this library reads version 6; finish the run with"
    ):
        run(tmp_path, rounds=4, resume=True)


def test_a_run_killed_before_its_first_checkpoint_resumes_under_its_own_name_and_settings_only(tmp_path):
    strategy = run(tmp_path, LDP, rounds=1)
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(LedgerError, match="of a run with other settings"):
        run(tmp_path, CDP, resume=True)
    resumed = run(tmp_path, LDP, resume=True)
    assert resumed.run == strategy.run
    assert [e.round for e in book(tmp_path).entries] == [1, 1, 2, 3]


def test_of_all_ledgers_heads_and_checkpoints_only_those_that_pay_are_resumed(
    tmp_path, monkeypatch, unanchored, at_once
):
    """Every combination of the files after each of three rounds, of this run and another: 6³ of them.

    What is accepted holds a charge for every round of the checkpoint, and no ledger behind its own head is.
    """
    monkeypatch.setattr("os.fsync", lambda fd: None)
    states: list[tuple[int, dict[str, bytes]]] = []
    for sign, name in ((1, "ours"), (-1, "theirs")):

        def watch(number, arrays, sign=sign, place=tmp_path / name):
            states.append((sign * number, snapshot(place)))

        config = run(tmp_path / name, rounds=3, watch=watch).config
    accepted, refusals, mixed = 0, "", tmp_path / "mixed"
    for (ledger, a), (head, b), (checkpoint, c) in itertools.product(states, repeat=3):
        mixed.mkdir()
        restore(mixed, a, LEDGER)
        restore(mixed, b, HEAD)
        restore(mixed, c, CHECKPOINT, f"round-{abs(checkpoint)}.safetensors")
        same = (ledger > 0) == (head > 0) == (checkpoint > 0) and ledger * head > 0
        # A ledger may be ahead of its head by the one charge that a crash leaves.
        pays = same and abs(ledger) >= abs(checkpoint) and abs(head) in (abs(ledger), abs(ledger) - 1)
        try:
            book, _, last = open_folder(mixed, config, {}, resume=True)
            accepted += 1
            assert pays, (ledger, head, checkpoint)
            assert last is not None
            assert {e.round for e in book.entries} >= set(range(1, last.state.round + 1))
            book.close()
        except LedgerError as error:
            assert not pays, (ledger, head, checkpoint)
            refusals += str(error)
        shutil.rmtree(mixed)
    assert "is of another run than the checkpoint beside it" in refusals
    # Per run: ledgers of 1 … 3 charges, as many checkpoints that they cover, with two heads each but for the first.
    assert accepted == 2 * sum(n * (2 if n > 1 else 1) for n in range(1, 4))


@each_setting
def test_the_whole_folder_put_back_to_an_earlier_moment_is_refused(algorithm, tmp_path, at_once):
    """The attack: ledger, head and checkpoint of round 1 agree with each other, so the later rounds would be forgotten."""
    place = tmp_path / "run"
    states = []
    run(place, algorithm, watch=lambda number, arrays: states.append(snapshot(place)))
    newest = snapshot(place)
    for number, old in enumerate(states[:-1], start=1):
        for left in place.iterdir():
            left.unlink()
        restore(place, old, *old)
        for also in ((), (CHECKPOINT,)):
            for name in also:
                (place / name).unlink()
            with pytest.raises(
                LedgerError, match=f"holds {number} charges, and its anchor .* has seen 3: the folder was put back"
            ):
                run(place, algorithm, rounds=4, resume=True)
    restore(place, newest, *newest)
    run(place, algorithm, rounds=4, resume=True)
    assert len(book(place)) == 4


@each_setting
@pytest.mark.parametrize("locks", [True, False])
def test_of_two_copies_of_a_folder_one_goes_on(algorithm, locks, tmp_path, monkeypatch):
    """Both went on to their ends before: 4 rounds stated by each, 6 spent. Without locks the one that waited is refused."""
    if not locks:
        monkeypatch.setattr("dpfedexp.engine.private_folder.try_lock", lambda descriptor: False)
    run(tmp_path / "one", algorithm, rounds=2)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    grid, given = grid_of(serialise=False), {"clients": 3, "rounds": 4, "resume": True, "noise": Silence}
    first = DpFedExp(algorithm, folder=tmp_path / "one", node_timeout=1, **given)
    first.begin(ArrayRecord(problem(3)[1].state_dict()))
    if locks:
        with pytest.raises(LedgerError, match="in use by another process, which may have a copy of its folder"):
            run(tmp_path / "two", algorithm, rounds=4, resume=True)
        first.finish()
        run(tmp_path / "one", algorithm, rounds=4, resume=True)
        winner, loser = tmp_path / "one", tmp_path / "two"
    else:
        run(tmp_path / "two", algorithm, rounds=4, resume=True)
        with pytest.raises(LedgerError, match="another copy of the folder went on"):
            first.configure_train(3, first.reported, ConfigRecord(), grid, 1)
        assert grid.sent == []
        first.finish()
        winner, loser = tmp_path / "two", tmp_path / "one"
    with pytest.raises(LedgerError, match="has seen 4"):
        run(loser, algorithm, rounds=4, resume=True)
    assert outcome(verify_run(winner)) == "holds"
    assert outcome(verify_run(loser)) == "false"
    assert len(book(winner)) == 4
    assert len(book(loser)) == 2


def test_an_anchor_that_is_missing_or_inside_the_run_folder_is_refused(tmp_path, monkeypatch, private_root):
    place = tmp_path / "run"
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(place / "private"))
    with pytest.raises(InputError, match="lies in the run's own folder"):
        run(place)
    assert not (place / LEDGER).exists()
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(private_root))
    run(place, rounds=1)
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "elsewhere"))
    missing = r"the anchor .* is missing, so an older copy .* copy it from where the run was begun"
    with pytest.raises(LedgerError, match=missing):
        run(place, rounds=2, resume=True)
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(private_root))
    run(place, rounds=2, resume=True)


@each_setting
def test_nothing_is_released_when_the_anchor_cannot_be_moved(algorithm, tmp_path, monkeypatch):
    """Neither a model nor, in local privacy, a request; what was charged stays charged."""
    place, seen = tmp_path / "run", []

    def full(self, mark):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:

        def watch(number, arrays):
            seen.append(number)
            patched.setattr(folder.SharedAnchor, "remember", full)

        with pytest.raises(LedgerError, match="round 2 can't be charged: No space left on device"):
            run(place, algorithm, watch=watch)
    assert seen == [1]
    assert json.loads((place / CHECKPOINT).read_text())["round"] == 1
    assert len(book(place)) == 2
    run(place, algorithm, resume=True)
    assert len(book(place)) == 4


@pytest.mark.parametrize("algorithm", [CDP, pytest.param(LDP, marks=long)], ids=["central", "local"])
def test_a_crash_at_any_write_leaves_no_release_uncharged_and_locks_nobody_out(algorithm, tmp_path, monkeypatch):
    """Every write to disk of a run of two rounds in turn is the last one that happens."""
    for write in itertools.count(1):
        place, shown = tmp_path / str(write), [0]
        with dying_at(write, monkeypatch) as left:
            run(place, algorithm, rounds=2, watch=lambda number, arrays, shown=shown: shown.append(number))
        if left[0] > 0:
            break
        charged = len(book(place)) if (place / LEDGER).exists() else 0
        assert charged >= max(shown)
        resumed = run(place, algorithm, rounds=2, resume=True)
        assert resumed.state.round == 2
        assert len(resumed.ledger.entries) >= 2
    assert write > 12, "every charge has a head and an anchor, every round two files"


def test_a_line_that_a_crash_tore_is_dropped_when_the_run_goes_on(tmp_path):
    open_folder(tmp_path, {"rounds": 3}, {}, resume=False)[0].close()
    path = tmp_path / LEDGER
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"seq":1,"round"')
    ledger, _, last = open_folder(tmp_path, {"rounds": 3}, {}, resume=True)
    ledger.close()
    assert last is None
    assert path.read_bytes() == whole


def test_the_dates_of_a_deployments_files_do_not_tell_how_long_a_round_took(tmp_path):
    run(tmp_path / "run", rounds=2)
    assert len({path.stat().st_mtime for path in (tmp_path / "run").iterdir()}) == 1
    for file in ("status.json", CHECKPOINT):
        content = json.loads((tmp_path / "run" / file).read_text())
        assert all(right(file, field) not in (None, "nonprivate") for field in content)
