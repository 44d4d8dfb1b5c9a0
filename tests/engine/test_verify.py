"""A run's claim is checked against its own ledger; every kind of disagreement is found."""

import json
from pathlib import Path

import pytest

from dpfedexp.accounting import Ledger, PrivacyStatement, compose
from dpfedexp.engine.verify import read_claim, recompute, verify_run
from dpfedexp.errors import InputError
from tests.accounting.events_by_hand import central, local
from tests.engine.small import sealed_model


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a run of ten rounds leaves."""
    with Ledger.create(tmp_path / "ledger.jsonl", delta=1e-5, algorithm="CDP-FedEXP", clients=1000) as ledger:
        for t in range(10):
            ledger.charge(t, central(5.0))
        sealed_model(tmp_path, ledger)
        statement = PrivacyStatement.from_charges(ledger.charges(), 1e-5, algorithm="CDP-FedEXP", clients=1000)
    (tmp_path / "privacy.json").write_text(statement.to_json(), encoding="utf-8")
    (tmp_path / "privacy.txt").write_text(statement.text, encoding="utf-8")
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"round": t}) + "\n" for t in range(10)))
    return tmp_path


def failed(run: Path, planned=None) -> list[str]:
    return [check.name for check in verify_run(run, planned) if not check.passed]


def test_an_honest_run_passes(run):
    assert failed(run) == []
    assert failed(run, central(5.0)) == []
    assert failed(run, central(5.0, clip=0.3)) == []
    assert failed(run, central(4.0)) == ["configuration"]
    assert failed(run, central(2.5, adjacency="add-remove")) == ["configuration"]
    append(run, '{"round": 99')
    assert failed(run) == [], "torn by a crash"


def append(run, text):
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text)


def other_ledger(run):
    path = run / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"noise":5.0', b'"noise":9.0', 1))


@pytest.mark.parametrize(
    ("edit", "check"),
    [
        (lambda run: append(run, '{"round": 10}\n'), "released rounds"),
        (lambda run: append(run, '{"round": 10}'), "released rounds"),
        (lambda run: (run / "privacy.txt").write_text("perfectly private\n"), "privacy.txt"),
        (other_ledger, "ledger"),
    ],
)
def test_an_edit_of_a_file_beside_the_claim_is_found(run, edit, check):
    """Every field of the claim itself is in `test_verify_attacks.py`."""
    edit(run)
    assert check in failed(run)


def test_a_line_that_is_too_long_hides_no_round_behind_it(run):
    """A torn line ends the file, so what is taken for one must not be followed by more."""
    for length in (2**20 - 1, 2**20, 2**20 + 1):
        (run / "metrics.jsonl").write_text(" " * length + '\n{"round": 99}\n')
        with pytest.raises(InputError, match="line 1: not a record"):
            verify_run(run)


def test_charges_of_other_runs_on_the_folders_ledger_pay_for_none_of_its_rounds(tmp_path):
    with Ledger.create(tmp_path / "ledger.jsonl", run="a") as ledger:
        ledger.charge(1, central(5.0), run="a")
        ledger.charge(2, central(5.0), run="b")
    (tmp_path / "run.json").write_text('{"run": "a"}')
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n')
    assert failed(tmp_path) == ["claim"]
    assert recompute(tmp_path).clients == 0
    (tmp_path / "metrics.jsonl").write_text('{"round": 1}\n{"round": 2}\n')
    assert failed(tmp_path) == ["released rounds", "claim"]


def test_a_claim_for_readers_of_the_models_is_recomputed(tmp_path):
    known = {"algorithm": "x", "clients": 1000}
    with Ledger.create(tmp_path / "ledger.jsonl", **known, reporting=800) as ledger:
        for t in range(10):
            ledger.charge(t, local(0.7))
        sealed_model(tmp_path, ledger)
    for reporting, wrong in ((800, []), (900, ["reporting", "models_only"])):
        claim = PrivacyStatement.from_charges(ledger.charges(), 1e-5, **known, reporting=reporting)
        (tmp_path / "privacy.json").write_text(claim.to_json(), encoding="utf-8")
        assert failed(tmp_path) == wrong


def test_a_run_without_a_claim_fails_and_is_explained_from_its_ledger(run):
    (run / "privacy.json").unlink()
    assert failed(run) == ["claim"]
    statement = recompute(run)
    assert (statement.rounds, statement.clients, statement.algorithm) == (10, 1000, "CDP-FedEXP")
    with Ledger.open(run / "ledger.jsonl") as ledger:
        ledger.describe("", planned_rounds=25)
    statement = recompute(run)
    assert (statement.planned_rounds, statement.stopping) == (25, "")
    assert statement.epsilon_total == compose([(central(5.0), 10)], 1e-5).epsilon
    statement = recompute(run, killed=True)
    assert (statement.rounds, statement.planned_rounds, statement.stopping) == (10, 25, "hand")
    assert statement.epsilon_total == compose([(central(5.0), 25)], 1e-5).epsilon


def test_a_folder_that_is_no_run_and_a_claim_of_another_version_are_sentences(run, tmp_path):
    claim = json.loads((run / "privacy.json").read_text())
    (run / "privacy.json").write_text(json.dumps(claim | {"version": None}))
    with pytest.raises(InputError, match="its version is None, and this library reads version 2"):
        verify_run(run)
    with pytest.raises(InputError, match="is not a folder"):
        verify_run(tmp_path / "nowhere")
    (tmp_path / "privacy.json").write_text("{}")
    with pytest.raises(InputError, match="is not a privacy statement"):
        read_claim(tmp_path)


def test_a_ledger_that_names_no_delta_is_read_at_1e_minus_5_and_no_client_counts_as_reporting(tmp_path):
    with Ledger.create(tmp_path / "ledger.jsonl", clients=1000) as ledger:
        ledger.charge(0, local(0.7))
    statement = recompute(tmp_path)
    assert (statement.delta, statement.simulated, statement.reporting, statement.models_only) == (1e-5, True, 0, None)
    assert statement.epsilon_total == ledger.guarantee(1e-5).epsilon
