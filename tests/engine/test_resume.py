"""Ledger, head, checkpoint and private folder go together, or the run is refused with what to do about it."""

import json
import os
import shutil
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from dpfedexp import Execution, Federation, InputError, Sgd, cdp_fedexp, dp_scaffold, train
from dpfedexp.accounting import Ledger, compose
from dpfedexp.engine.engine import Engine
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.engine.private_folder import PrivateFolder, SharedAnchor, parameter_tag
from dpfedexp.errors import LedgerError
from dpfedexp.models import linear_regression
from tests.arguments import arguments
from tests.engine.small import BareClients, Crash, crash_after, crash_in, entries, forge, random_rows

D, M, ROUNDS = 3, 6, 5
pytestmark = pytest.mark.usefixtures("untried")
PLAIN = cdp_fedexp(clip=0.3, noise_multiplier=2.0)
SCAFFOLD = dp_scaffold(clip=0.3, noise_multiplier=2.0)
FILES = ("ledger.jsonl", "ledger.jsonl.head", CHECKPOINT)


def clients():
    return random_rows([4] * M, D)


def run(folder=None, algorithm=PLAIN, data=None, **options):
    given = {"local": Sgd(lr=0.05, steps=2), "rounds": ROUNDS}
    given["execution"] = Execution(device="cpu", trainer="loop")
    data = Federation.from_clients(clients()) if data is None else data
    return train(linear_regression(D), data, algorithm, out=folder, **arguments(given | options))


def interrupted(folder, after=3, **options):
    with pytest.raises(Crash):
        run(folder, on_round=crash_after(after), **options)


def copies(folder, names=FILES):
    return {name: (folder / name).read_bytes() for name in names}


def put(folder, files):
    for name, content in files.items():
        (folder / name).write_bytes(content)


def moments(folder, **options):
    """The files of a run as they were after each of its rounds; the last round was interrupted."""
    seen = []
    for number in range(1, ROUNDS):
        interrupted(folder, after=number, **options)
        seen.append(copies(folder))
    return seen


def test_several_seeded_runs_on_one_ledger_pay_for_every_round_of_each(tmp_path):
    """Whatever their settings, also where one of them was interrupted or is the same again."""
    path = tmp_path / "project.jsonl"
    run(ledger=path, rounds=2)
    interrupted(tmp_path / "a", after=2, ledger=path)
    run(ledger=path, rounds=2)
    run(tmp_path / "b", ledger=path, rounds=3, seed=4)
    assert len(run(tmp_path / "a", ledger=path).history) == ROUNDS
    book = Ledger.open(path, read_only=True)
    assert (len(book), len({entry.run for entry in book.entries})) == (7 + ROUNDS, 4)


def test_a_budget_stops_the_runs_of_one_ledger_together():
    alone = run(rounds=4).privacy.epsilon_total
    book = Ledger.in_memory()
    first = run(ledger=book, rounds=3, budget=alone)
    second = run(ledger=book, rounds=3, budget=alone)
    assert (first.stopped, len(second.history), len(book)) == (None, 1, 4)
    assert "budget" in second.stopped
    assert second.privacy.epsilon_total == alone
    # The plan is on top of what the other run spent: 3 and 3 rounds, not the 3 of this one.
    assert second.privacy.planned_rounds == 6
    assert second.privacy.planned_epsilon_total == pytest.approx(run(rounds=6).privacy.epsilon_total, rel=1e-9)


@pytest.mark.parametrize(("algorithm", "ledger"), [(SCAFFOLD, None), (PLAIN, "project.jsonl")])
def test_a_crash_before_the_first_checkpoint_costs_a_seeded_run_nothing(algorithm, ledger, tmp_path, monkeypatch):
    given = {"algorithm": algorithm, "ledger": ledger and tmp_path / ledger}
    with monkeypatch.context() as patch:
        crash_in(patch, Engine, "_advance", 1, before=True)
        with pytest.raises(Crash):
            run(tmp_path / "run", **given)
    done = run(tmp_path / "run", **given)
    assert [entry.round for entry in done.ledger.entries] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("path", ["project.jsonl", "a/ledger.jsonl"], ids=["a project's", "a run's own"])
def test_a_ledger_of_two_runs_that_was_taken_back_is_refused_by_all_of_them(tmp_path, path):
    ledger = {"ledger": tmp_path / path}
    interrupted(tmp_path / "a", after=2, **ledger)
    early = copies(tmp_path, (path, f"{path}.head"))
    run(tmp_path / "b", rounds=2, **ledger)
    put(tmp_path, early)
    for folder in ("a", "c"):
        with pytest.raises(LedgerError, match="rolled back"):
            run(tmp_path / folder, **ledger)


def test_a_run_inside_a_run_on_one_ledger_leaves_the_outer_ones_anchor_working(tmp_path, private):
    counts = []

    def another(record):
        if record["round"] == 1:
            run(tmp_path / "inner", ledger=book, rounds=1)
        if record["round"] == 3:
            counts.extend(json.loads(path.read_text())["count"] for path in private.glob("*/anchor.json"))

    with Ledger.create(tmp_path / "project.jsonl") as book:
        run(tmp_path / "outer", ledger=book, on_round=another)
    assert counts == [4]


def test_the_ledger_of_another_run_in_the_runs_own_folder_is_refused(tmp_path):
    Ledger.create(tmp_path / "ledger.jsonl").close()
    for path in (None, tmp_path / "ledger.jsonl"):
        with pytest.raises(LedgerError, match="was written by a run with other settings"):
            run(tmp_path, ledger=path)


@pytest.mark.parametrize("secure", [False, True])
def test_an_older_checkpoint_is_replayed_for_free_with_the_same_noise_and_paid_for_with_fresh_noise(tmp_path, secure):
    seen = moments(tmp_path, secure=secure)
    put(tmp_path, {CHECKPOINT: seen[1][CHECKPOINT]})
    run(tmp_path, secure=secure)
    assert [entry.round for entry in entries(tmp_path)] == ([1, 2, 3, 4, 3, 4, 5] if secure else [1, 2, 3, 4, 5])


def private_file(pattern, content):
    path = next(Path(os.environ["DPFEDEXP_PRIVATE"]).glob(f"*/{pattern}"))
    path.unlink()
    if content is not None:
        path.write_text(content)


def remove(folder, *names):
    for name in names:
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda f: remove(f, "ledger.jsonl"), "is missing, so what was charged is unknown"),
        (lambda f: remove(f, "ledger.jsonl", CHECKPOINT), "traces of a run, but its ledger is missing"),
        (lambda f: forge(f, version=2), "has version 2, and this library reads version 4; finish"),
        (lambda f: forge(f, round=4, history=[{"round": n} for n in range(1, 5)]), "round 4 .* was never charged"),
        (lambda f: forge(f, load_file(f / CHECKPOINT) | {"control": torch.ones(1)}), "control variate does not fit"),
        (lambda f: private_file("controls-3*", None), "control variates of round 3 are missing"),
        (lambda f: private_file("controls-3*", "no tensors"), r"controls-3\.safetensors' is damaged"),
        (lambda f: private_file("data.json", '{"key": "00"}'), r"data\.json' is damaged"),
        (lambda f: private_file("data.json", '{"key": "zz", "tag": "00"}'), r"data\.json' is damaged"),
    ],
)
def test_what_does_not_go_together_is_refused_with_what_to_do(damage, words, tmp_path):
    interrupted(tmp_path, algorithm=SCAFFOLD)
    damage(tmp_path)
    with pytest.raises((InputError, LedgerError), match=words):
        run(tmp_path, algorithm=SCAFFOLD)


def test_a_ledger_that_does_not_name_its_run_is_not_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(Ledger, "create", lambda path, run, _create=Ledger.create, **header: _create(path, **header))
    interrupted(tmp_path)
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(LedgerError, match="does not name its run"):
        run(tmp_path)


def test_a_folder_that_was_taken_back_as_a_whole_is_refused(tmp_path):
    seen = moments(tmp_path)
    for early in seen[:-1]:
        put(tmp_path, early)
        with pytest.raises(LedgerError, match=r"rolled back or replaced.*Restore the newest ledger"):
            run(tmp_path)
    # An older ledger with its own head, beside the newest checkpoint and without it.
    put(tmp_path, seen[-1] | {name: seen[1][name] for name in FILES[:2]})
    with pytest.raises(LedgerError, match=r"with 2 charges, is not the one that belongs to .* written after 4"):
        run(tmp_path)
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(LedgerError, match="rolled back"):
        run(tmp_path)
    put(tmp_path, seen[-1])
    assert len(run(tmp_path).history) == ROUNDS
    put(tmp_path, seen[-1])
    with pytest.raises(InputError, match=r"private folder .* is missing"):
        run(tmp_path)


@pytest.mark.parametrize("other", [{"run": "another"}, {"round": 2}])
def test_as_many_charges_of_another_run_or_for_another_round_pay_for_nothing_here(other, tmp_path):
    interrupted(tmp_path, ledger=(book := Ledger.in_memory()))
    forged = Ledger.in_memory()
    for entry in book.entries:
        charge = replace(entry, **other)
        forged.charge(charge.round, charge.event, run=charge.run, noise=f"noise of round {entry.round}")
    with pytest.raises(LedgerError, match="round 1 of this run was never charged"):
        run(tmp_path, ledger=forged)


def edited(client):
    rows = clients()
    rows[client][client % 2][client % 4] += 1e-3
    return rows


@pytest.mark.parametrize(
    ("kind", "with_checkpoint"),
    [(Federation.from_clients, True), (Federation.from_clients, False), (BareClients, True)],
)
def test_an_edit_of_any_row_of_any_client_is_noticed(tmp_path, kind, with_checkpoint):
    interrupted(tmp_path, after=1, data=kind(clients()))
    if not with_checkpoint:
        (tmp_path / CHECKPOINT).unlink()
    fewer = clients()
    fewer[2] = tuple(part[:3] for part in fewer[2])
    for other in [*(edited(client) for client in range(M)), fewer]:
        with pytest.raises(InputError, match="data are not those that the run began with"):
            run(tmp_path, data=kind(other))
    assert len(run(tmp_path, data=kind(clients())).history) == ROUNDS


def test_without_its_private_folder_an_unfinished_run_is_refused_and_a_finished_one_is_returned(tmp_path, private):
    interrupted(tmp_path / "run")
    (held,) = private.iterdir()
    shutil.move(held, tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"private folder .* is missing. Copy that folder .* set DPFEDEXP_PRIVATE"):
        run(tmp_path / "run")
    shutil.move(tmp_path / "elsewhere", held)
    whole = run(tmp_path / "run")
    assert list(private.iterdir()) == []
    again = run(tmp_path / "run")
    assert torch.equal(next(again.model.parameters()), next(whole.model.parameters()))


def every_file(*folders):
    return [path for folder in folders for path in folder.rglob("*") if path.is_file()]


def test_what_clients_remember_never_lies_in_the_runs_folder_and_leaves_the_disk_at_every_end(tmp_path, private):
    folder = tmp_path / "run"
    whole = run(tmp_path / "whole", algorithm=SCAFFOLD)
    assert [path.name for path in every_file(tmp_path) if "controls" in path.name] == []
    interrupted(folder, algorithm=SCAFFOLD)
    (held,) = private.iterdir()
    assert sorted(path.name for path in held.iterdir()) == ["anchor.json", "controls-3.safetensors", "data.json"]
    assert held.stat().st_mode & 0o077 == 0
    assert all(path.stat().st_mode & 0o077 == 0 for path in held.iterdir())
    assert all(b"client_controls" not in path.read_bytes() for path in every_file(folder))
    left_behind = {path.name: path.read_bytes() for path in held.iterdir()}
    done = run(folder, algorithm=SCAFFOLD)
    assert torch.equal(next(done.model.parameters()), next(whole.model.parameters()))
    assert every_file(private) == []
    # As after a power failure between the last checkpoint and the removal.
    held.mkdir()
    put(held, left_behind)
    run(folder, algorithm=SCAFFOLD)
    assert every_file(private) == []


def test_after_a_budget_stop_nothing_that_clients_remember_is_left_and_a_larger_budget_goes_on(tmp_path, private):
    budget = run(rounds=2, algorithm=SCAFFOLD).privacy.epsilon_total
    stopped = run(tmp_path / "run", algorithm=SCAFFOLD, budget=budget)
    assert len(stopped.history) == 2
    assert stopped.stopped
    assert sorted(path.name for path in every_file(private)) == ["anchor.json", "data.json"]
    with pytest.warns(UserWarning, match="control variates were deleted when the budget ended"):
        assert len(run(tmp_path / "run", algorithm=SCAFFOLD).history) == ROUNDS


def test_an_anchor_that_can_not_be_read_is_a_sentence_and_not_a_ledger_that_was_never_seen():
    anchor = SharedAnchor.of("0" * 64)
    assert anchor.mark() is None
    anchor.path.mkdir(parents=True)
    with pytest.raises(InputError, match=r"private file .* can't be read"):
        anchor.mark()


def test_parameters_have_a_tag_of_sixteen_digits_that_one_bit_changes():
    tags = [parameter_tag(torch.tensor(values)) for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0000002])]
    assert tags[0] == tags[1] != tags[2]
    assert {len(bytes.fromhex(tag)) for tag in tags} == {8}


def test_a_complete_run_gives_up_the_ledger_before_its_private_folder_goes(tmp_path, monkeypatch):
    book, witnesses, remove = Ledger.create(tmp_path / "project.jsonl"), [], PrivateFolder.remove

    def seen(self):
        witnesses.append(list(book.witnesses))
        remove(self)

    monkeypatch.setattr(PrivateFolder, "remove", seen)
    run(tmp_path / "run", ledger=book)
    assert witnesses == [[]]


def test_an_anchor_that_can_not_be_written_stops_the_round_before_its_release(tmp_path, monkeypatch):
    interrupted(tmp_path)
    with monkeypatch.context() as patch:
        full = repeat(OSError(28, "No space left on device"))
        patch.setattr(PrivateFolder, "remember", Mock(side_effect=chain([None], full)))
        with pytest.raises(LedgerError, match=r"round 4 can't be charged: No space left.*Nothing of it was released"):
            run(tmp_path)
    assert len(run(tmp_path).history) == ROUNDS
    assert [entry.round for entry in entries(tmp_path)] == [1, 2, 3, 4, 5]


def test_a_private_folder_that_can_not_be_made_or_lies_in_the_run_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "file" / "below"))
    with pytest.raises(InputError, match=r"private folder .* can't be written.*Set DPFEDEXP_PRIVATE"):
        run(tmp_path / "run")
    assert list((tmp_path / "run").iterdir()) == []
    monkeypatch.setenv("DPFEDEXP_PRIVATE", str(tmp_path / "run" / "private"))
    with pytest.raises(InputError, match="is inside the run's folder"):
        run(tmp_path / "run")


def test_a_crashed_secure_round_meets_the_budget_again_when_it_is_run_again(tmp_path, monkeypatch):
    event = run(secure=True, rounds=1).ledger.entries[0].event
    # Three rounds fit and a fourth does not.
    budget = compose([(event, 3)], PLAIN.delta).epsilon * (1 + 1e-9)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        crash_in(patch, Ledger, "charge", 3, before=False)
        with pytest.raises(Crash):
            run(folder, secure=True, budget=budget)
    assert [entry.round for entry in entries(folder)] == [1, 2, 3]
    resumed = run(folder, secure=True, budget=budget)
    # Round 3 was paid for but not released. Its noise is gone, so releasing it would cost once more, and nothing is left.
    assert [record["round"] for record in resumed.history] == [1, 2]
    assert "round 3" in resumed.stopped
    assert [entry.round for entry in entries(folder)] == [1, 2, 3]
    assert resumed.privacy.epsilon_total <= budget
