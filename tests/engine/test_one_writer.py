"""Of all copies of a run's folder one goes on: the others are refused before their clients train."""

import shutil

import pytest

from dpfedexp import InputError
from dpfedexp.accounting import Ledger
from dpfedexp.engine.simulated import Simulation
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import LedgerError
from tests.engine.small import ROUNDS, Crash, crash_after, entries, small_run

pytestmark = pytest.mark.usefixtures("untried")
IN_USE = "the run is in use by another process, which may have a copy of its folder"
LOST = "another copy of the run continued"


@pytest.fixture
def trained(monkeypatch):
    """The rounds in which clients trained."""
    rounds, part = [], Simulation.collect

    def counted(self, request, cohort):
        rounds.append(request.round)
        return part(self, request, cohort)

    monkeypatch.setattr(Simulation, "collect", counted)
    return rounds


def killed_after(folder, after, **options):
    with pytest.raises(Crash):
        small_run(out=folder, on_round=crash_after(after), **options)


def two_copies(tmp_path, after=2, **options):
    killed_after(tmp_path / "a", after, **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


def when_opened(do):
    """A callback that does something once the run holds its ledger, before its first round."""

    def callback(record): ...

    callback.on_resume = lambda history: do()
    return callback


def charged(*folders):
    """All the releases in some ledgers, each once."""
    return {(entry.run, entry.round, entry.noise) for folder in folders for entry in entries(folder)}


def test_a_copy_is_refused_while_the_run_is_open(tmp_path, trained):
    one, two = two_copies(tmp_path, secure=True)
    trained.clear()
    problems = []

    def go_on_too():
        with pytest.raises(LedgerError, match=IN_USE) as refused:
            small_run(out=two, secure=True)
        problems.append(str(refused.value))
        assert trained == []

    run = small_run(out=one, secure=True, on_round=when_opened(go_on_too))
    assert len(problems) == 1
    assert len(run.history) == ROUNDS
    assert len(charged(one, two)) == run.privacy.rounds == ROUNDS


def test_a_finished_copy_whose_original_went_on_can_not_go_on_and_does_not_verify(tmp_path, trained):
    """A run that a budget ended has a statement, and a larger budget goes on from it."""
    one, two = tmp_path / "a", tmp_path / "b"
    small_run(out=one, secure=True, budget=small_run(rounds=3, secure=True).privacy.epsilon_total)
    shutil.copytree(one, two)
    assert outcome(verify_run(two)) == "holds"
    small_run(out=one, secure=True)
    trained.clear()
    with pytest.raises((InputError, LedgerError)):
        small_run(out=two, secure=True)
    assert trained == []
    assert outcome(verify_run(one)) == "holds"
    (check,) = (check for check in verify_run(two) if check.name == "newest copy")
    assert not check.passed
    assert f"{ROUNDS} charges that this ledger does not hold: another copy of the run went on" in check.detail


def test_without_locks_the_copy_that_was_overtaken_is_refused_before_its_clients_train(tmp_path, trained, monkeypatch):
    """As on a network file system: both are opened, and one of them waits until the other has made its rounds."""
    monkeypatch.setattr("dpfedexp.engine.private_folder.try_lock", lambda descriptor: False)
    one, two = two_copies(tmp_path, secure=True)
    trained.clear()
    overtake = when_opened(lambda: killed_after(two, 4, secure=True))
    with pytest.raises((InputError, LedgerError)) as refused:
        small_run(out=one, secure=True, on_round=overtake)
    assert LOST in str(refused.value)
    assert trained == [3, 4], "the other copy's rounds"
    assert len(charged(one, two)) == 4
    assert len(small_run(out=two, secure=True).history) == ROUNDS


@pytest.mark.parametrize(
    ("owner", "name", "charges"),
    [(Simulation, "collect", 2), (Ledger, "_move_witnesses", 3)],
    ids=["while clients train", "between the last check and the move of the anchor"],
)
def test_without_locks_the_second_of_two_copies_to_charge_releases_nothing(tmp_path, monkeypatch, owner, name, charges):
    """Both pass every check before the round."""
    monkeypatch.setattr("dpfedexp.engine.private_folder.try_lock", lambda descriptor: False)
    one, two = two_copies(tmp_path, secure=True)
    original, released = getattr(owner, name), []

    def overtaken(*given):
        monkeypatch.setattr(owner, name, original)
        killed_after(two, 3, secure=True)
        return original(*given)

    monkeypatch.setattr(owner, name, overtaken)
    with pytest.raises(LedgerError, match=LOST):
        small_run(out=one, secure=True, on_round=released.append)
    assert released == []
    assert len(entries(one)) == charges
    assert outcome(verify_run(one)) == "false"
    assert len(small_run(out=two, secure=True).history) == ROUNDS


def test_a_copy_of_a_projects_ledger_is_refused_while_a_run_charges_the_other(tmp_path):
    project, copy = tmp_path / "project.jsonl", tmp_path / "copy.jsonl"
    small_run(ledger=project, rounds=2)
    for name in ("project.jsonl", "project.jsonl.head"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("project", "copy"))

    def charge_the_copy():
        with pytest.raises(LedgerError, match=IN_USE):
            small_run(ledger=copy, rounds=2)

    small_run(ledger=project, rounds=2, on_round=when_opened(charge_the_copy))
    with pytest.raises(LedgerError, match=LOST):
        small_run(ledger=copy, rounds=2)
    assert len(Ledger.open(project, read_only=True)) == 4
