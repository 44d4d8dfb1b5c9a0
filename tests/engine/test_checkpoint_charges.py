"""No release without its charge, whatever crashed: the budget of a secure run, and a ledger that lost charges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dpfedexp import Sgd, dp_fedavg, train
from dpfedexp.accounting import Ledger, compose
from dpfedexp.accounting.ledger import head_path
from dpfedexp.data import synthetic_regression
from dpfedexp.errors import LedgerError
from dpfedexp.models import linear_regression

D, DELTA = 4, 1e-5
PROBLEM = synthetic_regression(8, D, seed=2)
ALGORITHM = dp_fedavg(clip=0.3, noise_multiplier=4.0, delta=DELTA)


class Crash(BaseException):
    """Stands for a power failure: nothing may catch it."""


def run(folder: Path, **options):
    options = {"local": Sgd(lr=0.02, steps=2), "rounds": 5, "device": "cpu", "progress": False} | options
    return train(linear_regression(D), PROBLEM.federation, ALGORITHM, checkpoint=folder, **options)


def charges(folder: Path):
    with Ledger.open(folder / "ledger.jsonl", read_only=True) as ledger:
        return ledger.entries


def crash_after_charge(monkeypatch, number: int) -> None:
    original, made = Ledger.charge, []

    def charge(self, *given, **more):
        value = original(self, *given, **more)
        made.append(value)
        if len(made) == number:
            raise Crash
        return value

    monkeypatch.setattr(Ledger, "charge", charge)


@pytest.mark.parametrize("secure", [True, "strict"])
def test_a_crashed_secure_round_meets_the_budget_again_when_it_is_run_again(secure, tmp_path, monkeypatch):
    run(tmp_path / "one", secure=secure, rounds=1)
    event = charges(tmp_path / "one")[0].event
    # Three rounds fit and a fourth does not.
    budget = compose([(event, 3)], DELTA).epsilon * (1 + 1e-9)
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        crash_after_charge(patch, 3)
        with pytest.raises(Crash):
            run(folder, secure=secure, budget=budget)
    assert [entry.round for entry in charges(folder)] == [1, 2, 3]
    resumed = run(folder, secure=secure, budget=budget, resume=True)
    # Round 3 was paid for but not released. Its noise is gone, so releasing it would cost once more, and nothing is left.
    assert [record["round"] for record in resumed.history] == [1, 2]
    assert resumed.stopped is not None
    assert "round 3" in resumed.stopped
    assert [entry.round for entry in charges(folder)] == [1, 2, 3]
    assert resumed.privacy.epsilon_total <= budget


def test_a_crashed_secure_round_is_paid_for_twice_where_the_budget_allows(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        crash_after_charge(patch, 2)
        with pytest.raises(Crash):
            run(tmp_path, secure=True, rounds=3)
    resumed = run(tmp_path, secure=True, rounds=3, resume=True)
    assert [entry.round for entry in charges(tmp_path)] == [1, 2, 2, 3]
    event = charges(tmp_path)[0].event
    assert resumed.privacy.epsilon_total == pytest.approx(compose([(event, 4)], DELTA).epsilon, rel=1e-12)


def interrupted(folder: Path, *, secure: bool) -> None:
    """Four of five rounds, complete with their checkpoint."""

    def stop(record):
        if record["round"] == 4:
            raise Crash

    with pytest.raises(Crash):
        run(folder, secure=secure, on_round=stop)
    assert len(charges(folder)) == 4


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("kept", [3, 2, 0])
def test_a_checkpoint_whose_last_rounds_were_never_charged_is_refused(kept, secure, tmp_path):
    interrupted(tmp_path, secure=secure)
    path = tmp_path / "ledger.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)[: 1 + kept]
    path.write_bytes(b"".join(lines))
    head = json.loads(head_path(path).read_text()) | {"count": kept, "hash": json.loads(lines[-1])["hash"]}
    head_path(path).write_text(json.dumps(head))
    assert len(charges(tmp_path)) == kept, "on its own the shorter ledger is in order"
    with pytest.raises(LedgerError):
        run(tmp_path, secure=secure, resume=True)
    assert len(charges(tmp_path)) == kept, "and nothing is added to it"


@pytest.mark.parametrize("secure", [False, True])
def test_as_many_charges_for_other_rounds_do_not_pay_for_the_last_one(secure, tmp_path):
    interrupted(tmp_path, secure=secure)
    path = tmp_path / "ledger.jsonl"
    with Ledger.open(path, read_only=True) as ledger:
        header, entries = dict(ledger.header), ledger.entries
    path.unlink()
    head_path(path).unlink()
    rest = {
        name: value for name, value in header.items() if name not in ("format", "version", "config", "hash", "previous")
    }
    with Ledger.create(path, config_hash=header["config"], **rest) as forged:
        for entry in entries[:3]:
            forged.charge(entry.round, entry.event, run=entry.run, noise=entry.noise)
        forged.charge(1, entries[0].event, run=entries[0].run, noise="another")
    with pytest.raises(LedgerError):
        run(tmp_path, secure=secure, resume=True)
