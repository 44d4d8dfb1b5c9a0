"""Of all copies of a run's folder one goes on: the others are refused before their clients train."""

import os
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from dpfedexp import InputError
from dpfedexp.accounting import Ledger
from dpfedexp.cli import app
from dpfedexp.engine.rounds import Simulation
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import LedgerError
from tests.engine.small import ROUNDS, Crash, crash_after, entries, small_run

IN_USE = "the run is in use by another process, which may have a copy of its folder"
LOST = "another copy of its folder went on"
FILE = """
[data]
kind = "synthetic"
clients = 12
dimension = 4
[algorithm]
name = "cdp_fedexp"
clip = 0.3
noise_multiplier = 4.0
[local]
lr = 0.02
steps = 2
max_examples = 8
[run]
rounds = 4
secure = true
device = "cpu"
"""


@pytest.fixture(autouse=True)
def private(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("private")
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(folder))
    return folder


@pytest.fixture
def trained(monkeypatch):
    """The rounds in which clients trained."""
    rounds, part = [], Simulation.cohort_part

    def counted(self, state, mechanism, cohort, number):
        rounds.append(number)
        return part(self, state, mechanism, cohort, number)

    monkeypatch.setattr(Simulation, "cohort_part", counted)
    return rounds


def killed_after(folder, after, **options):
    with pytest.raises(Crash):
        small_run(out=folder, on_round=crash_after(after), **options)


def two_copies(tmp_path, after=2, **options):
    killed_after(tmp_path / "a", after, **options)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    return tmp_path / "a", tmp_path / "b"


class WhenOpened:
    """Does something once the run holds its ledger, before its first round."""

    def __init__(self, do):
        self.do = do

    def resumed(self, history):
        self.do()

    def __call__(self, record):
        pass


def charged(*folders):
    """All the releases in some ledgers, each once."""
    entries = [Ledger.open(folder / "ledger.jsonl", read_only=True).entries for folder in folders]
    return {(entry.run, entry.round, entry.noise) for many in entries for entry in many}


def test_a_copy_is_refused_while_the_run_is_open(tmp_path, trained):
    """Both went on to their ends before: ε = 5.545 of 6 rounds stated by each, 7.511 of 10 spent."""
    one, two = two_copies(tmp_path, secure=True)
    trained.clear()
    problems = []

    def go_on_too():
        with pytest.raises(LedgerError, match=IN_USE) as refused:
            small_run(out=two, resume=True, secure=True)
        problems.append(str(refused.value))
        assert trained == []

    run = small_run(out=one, resume=True, secure=True, on_round=WhenOpened(go_on_too))
    assert len(problems) == 1
    assert len(run.history) == ROUNDS
    assert len(charged(one, two)) == run.privacy.rounds == ROUNDS


def test_a_copy_can_not_go_on_after_the_run_has_ended_and_does_not_verify(tmp_path, trained):
    one, two = two_copies(tmp_path, secure=True)
    small_run(out=one, resume=True, secure=True)
    trained.clear()
    with pytest.raises((InputError, LedgerError)):
        small_run(out=two, resume=True, secure=True)
    assert trained == []
    assert outcome(verify_run(one)) == "holds"
    assert outcome(verify_run(two)) == "false"
    said = CliRunner().invoke(app, ["privacy", "verify", str(two), "--json"])
    assert said.exit_code == 1
    assert "another copy of the run went on" in said.output


def test_a_finished_copy_whose_original_went_on_does_not_verify(tmp_path):
    """A run that a budget ended has a statement, and a larger budget goes on from it."""
    alone = small_run(rounds=3, secure=True).privacy.epsilon_total
    small_run(out=tmp_path / "a", secure=True, budget=alone)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert outcome(verify_run(tmp_path / "b")) == "holds"
    small_run(out=tmp_path / "a", secure=True, resume=True)
    assert outcome(verify_run(tmp_path / "a")) == "holds"
    (check,) = (check for check in verify_run(tmp_path / "b") if check.name == "newest copy")
    assert not check.passed
    assert f"knows of {ROUNDS} charges that this ledger does not hold" in check.detail


def test_without_locks_the_copy_that_was_overtaken_is_refused_before_its_clients_train(tmp_path, trained, monkeypatch):
    """As on a network file system: both are opened, and one of them waits until the other has made its rounds."""
    monkeypatch.setattr("dpfedexp.engine.private_folder.try_lock", lambda descriptor: False)
    one, two = two_copies(tmp_path, secure=True)
    trained.clear()
    with pytest.raises((InputError, LedgerError)) as refused:
        small_run(
            out=one,
            resume=True,
            secure=True,
            on_round=WhenOpened(lambda: killed_after(two, 4, resume=True, secure=True)),
        )
    assert LOST in str(refused.value)
    assert trained == [3, 4], "the other copy's rounds"
    assert len(charged(one, two)) == 4
    assert len(small_run(out=two, resume=True, secure=True).history) == ROUNDS


def test_without_locks_two_copies_that_train_at_once_release_one_round(tmp_path, monkeypatch):
    """Both pass every check before the round; the second to charge is refused, and nothing of its round is released."""
    monkeypatch.setattr("dpfedexp.engine.private_folder.try_lock", lambda descriptor: False)
    one, two = two_copies(tmp_path, secure=True)
    part, released = Simulation.cohort_part, []

    def overtaken(self, *given):
        sums = part(self, *given)
        monkeypatch.setattr(Simulation, "cohort_part", part)
        killed_after(two, 3, resume=True, secure=True)
        return sums

    monkeypatch.setattr(Simulation, "cohort_part", overtaken)
    with pytest.raises(LedgerError, match=LOST):
        small_run(out=one, resume=True, secure=True, on_round=released.append)
    assert released == []
    assert len(charged(one)) == 2
    assert len(small_run(out=two, resume=True, secure=True).history) == ROUNDS


def test_a_lost_compare_and_swap_releases_nothing(tmp_path, monkeypatch):
    """The other copy moves the anchor between this one's last check and its charge."""
    monkeypatch.setattr("dpfedexp.engine.private_folder.try_lock", lambda descriptor: False)
    one, two = two_copies(tmp_path, secure=True)
    append, released = Ledger._move_witnesses, []

    def overtaken(self):
        monkeypatch.setattr(Ledger, "_move_witnesses", append)
        killed_after(two, 3, resume=True, secure=True)
        append(self)

    monkeypatch.setattr(Ledger, "_move_witnesses", overtaken)
    with pytest.raises(LedgerError, match=LOST):
        small_run(out=one, resume=True, secure=True, on_round=released.append)
    assert released == []
    assert outcome(verify_run(one)) == "false"
    assert len(small_run(out=two, resume=True, secure=True).history) == ROUNDS


def test_a_copy_of_a_projects_ledger_is_refused_while_a_run_charges_the_other(tmp_path):
    project, copy = tmp_path / "project.jsonl", tmp_path / "copy.jsonl"
    small_run(ledger=project, rounds=2)
    for name in ("project.jsonl", "project.jsonl.head"):
        shutil.copy(tmp_path / name, tmp_path / name.replace("project", "copy"))

    def charge_the_copy():
        with pytest.raises(LedgerError, match=IN_USE):
            small_run(ledger=copy, rounds=2)

    small_run(ledger=project, rounds=2, on_round=WhenOpened(charge_the_copy))
    with pytest.raises(LedgerError, match=LOST):
        small_run(ledger=copy, rounds=2)
    assert len(Ledger.open(project, read_only=True)) == 4


def test_a_run_that_was_killed_leaves_no_lock_and_of_two_processes_on_two_copies_one_goes_on(tmp_path, private):
    """Killed between the charge of round 2 and the move of the anchor."""
    file, folders = tmp_path / "my.toml", [tmp_path / "a", tmp_path / "b"]
    file.write_text(FILE)
    killed = (
        "import os, signal; from dpfedexp.accounting.ledger import Ledger; move = Ledger._move_witnesses\n"
        "def killed(self):\n"
        "    len(self) == 2 and os.kill(os.getpid(), signal.SIGKILL)\n"
        "    move(self)\n"
        "Ledger._move_witnesses = killed\n"
    )

    def start(folder, before=""):
        script = f"from dpfedexp.cli import app\napp(['train', {str(file)!r}, '--out', {str(folder)!r}, '--resume', '--quiet'])"
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            [sys.executable, "-c", before + script], env=surroundings, stderr=subprocess.PIPE, text=True
        )

    assert start(folders[0], killed).wait() == -9
    assert len(entries(folders[0])) == 2, "charged, and not yet in the anchor"
    shutil.copytree(*folders)
    runs = [start(folder) for folder in folders]
    said = [run.communicate()[1] for run in runs]
    codes = [run.returncode for run in runs]
    assert sorted(code == 0 for code in codes) == [False, True], said
    winner, loser = sorted(folders, key=lambda folder: codes[folders.index(folder)] != 0)
    refusal = " ".join(said[folders.index(loser)].split())
    assert any(part in refusal for part in ("in use by another process", "can't go on", "is missing")), said
    assert [entry.round for entry in entries(winner)] == [1, 2, 2, 3, 4]
    assert outcome(verify_run(winner)) == "holds"
    assert outcome(verify_run(loser)) != "holds"
    assert len(charged(*folders)) == 4 + 1
    assert list(private.rglob("*.lock")) == []
