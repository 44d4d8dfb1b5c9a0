"""Folders of runs that were stopped, killed, resumed, saved or tampered with say what is true."""

import json
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from dpfedexp import Federation, Run, Sgd, Stop, dp_fedavg, train
from dpfedexp.engine import checkpoint
from dpfedexp.engine.open_run import OpenRun
from dpfedexp.engine.stopping import Interrupted
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import InputError, LedgerError, RoundFailed
from tests.engine.small import ROUNDS, Crash, crash_after, random_rows, small_run

pytestmark = pytest.mark.usefixtures("untried")
STOPPED = {"on_round": lambda record: Stop("enough", "test") if record["round"] == 2 else None}


def interrupt(record):
    if record["round"] == 2:
        raise KeyboardInterrupt


def test_a_run_that_goes_on_leaves_no_old_claim_or_model_beside_new_rounds(tmp_path):
    """The hole: a resumed run that was killed had the claim of two rounds and a ledger of four."""
    with pytest.raises(Interrupted):
        small_run(out=tmp_path, on_round=interrupt)
    assert outcome(verify_run(tmp_path)) == "holds"
    with pytest.raises(Crash):
        small_run(out=tmp_path, on_round=crash_after(4))
    assert not (tmp_path / "privacy.json").exists()
    assert outcome(verify_run(tmp_path)) == "incomplete"
    loaded = Run.load(tmp_path)
    assert (len(loaded.history), loaded.privacy.rounds, loaded.privacy.stopping) == (4, 4, "hand")
    again = small_run(out=tmp_path)
    assert outcome(verify_run(tmp_path)) == "holds"
    assert again.privacy.epsilon_total == small_run().privacy.epsilon_total


@pytest.mark.parametrize("secure", [False, True])
def test_a_saved_copy_verifies_whatever_the_run_went_through(secure, tmp_path):
    given = {"out": tmp_path / "run", "secure": secure}
    with pytest.raises(Interrupted) as stopped:
        small_run(**given, on_round=interrupt)
    assert outcome(verify_run(stopped.value.run.save(tmp_path / "interrupted"))) == "holds"
    small_run(**given).save(tmp_path / "copy")
    assert outcome(verify_run(tmp_path / "copy")) == "holds"


def test_a_decision_that_ended_a_run_is_not_forgotten_when_it_ends_early_again(tmp_path):
    first = small_run(out=tmp_path, **STOPPED)
    assert first.privacy.stopping == "test"
    again = small_run(out=tmp_path, budget=0.01)
    assert (again.privacy.stopping, again.privacy.epsilon_total) == ("test", first.privacy.epsilon_total)
    whole = small_run(out=tmp_path)
    assert (whole.privacy.stopping, len(whole.history)) == ("", ROUNDS)


@pytest.mark.parametrize("end", [KeyboardInterrupt, RoundFailed, ValueError])
def test_a_run_that_ends_before_its_first_round_claims_nothing_false(end, tmp_path):
    class Sink:
        def on_train_begin(self, facts):
            raise end("client 7 has 12 rows")

        def __call__(self, record): ...

    with pytest.raises((end, Interrupted)):
        small_run(out=tmp_path, on_round=Sink())
    assert outcome(verify_run(tmp_path)) != "false"
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["round"]) == ("failed", 0)
    assert "12 rows" not in json.dumps(status)


@pytest.mark.parametrize("noise", [1e-100, 1e-151])
def test_an_epsilon_of_any_size_is_in_the_status(noise, tmp_path):
    run = small_run(out=tmp_path, algorithm=dp_fedavg(clip=0.5, noise_multiplier=noise))
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["status"] == "completed"
    assert float(status["epsilon"]) == run.privacy.epsilon_total > 1e100


def test_what_a_callback_raises_is_in_no_file(tmp_path):
    with pytest.raises(RoundFailed):
        small_run(out=tmp_path, on_round=crash_after(2, RoundFailed("client 7 has 12 rows")))
    assert "12 rows" not in (tmp_path / "status.json").read_text() + (tmp_path / "run.json").read_text()


@pytest.mark.parametrize(("number", "stopped"), [(2, "see the log of the run."), (ROUNDS, None)])
def test_a_run_whose_callback_fails_is_unfinished_only_where_rounds_are_left(number, stopped, tmp_path):
    with pytest.raises(ValueError, match="no room"):
        small_run(out=tmp_path, on_round=crash_after(number, ValueError("no room")))
    assert json.loads((tmp_path / "run.json").read_text()).get("stopped") == stopped
    assert json.loads((tmp_path / "status.json").read_text())["status"] == "failed"


def test_a_failed_run_is_called_failed_even_where_its_model_can_not_be_sealed(tmp_path, monkeypatch):
    monkeypatch.setattr(OpenRun, "seal", Mock(side_effect=LedgerError("the disk is full")))
    with pytest.raises(LedgerError, match="the disk is full"):
        small_run(out=tmp_path)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["status"], status["round"]) == ("failed", ROUNDS)


def test_a_measurement_that_fails_ends_the_run_and_its_round_is_kept(tmp_path):
    measure = Mock(side_effect=[{}, ValueError("no such file"), *[{}] * ROUNDS])
    with pytest.raises(ValueError, match="no such file"):
        small_run(out=tmp_path, test=None, evaluate=measure)
    assert len(Run.load(tmp_path).history) == 2
    done = small_run(out=tmp_path, test=None, evaluate=measure)
    assert [entry.round for entry in done.ledger.entries] == list(range(1, ROUNDS + 1))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))).sum(1)


def test_tied_weights_of_an_unfinished_run_are_the_trained_ones_and_it_goes_on(tmp_path):
    clients = Federation.from_clients(random_rows([4] * 12, 3))
    given = {"local": Sgd(lr=0.1, steps=2), "rounds": 4, "out": tmp_path}
    algorithm = dp_fedavg(clip=0.5, noise_multiplier=0.1)
    with pytest.raises(Crash):
        train(Tied(), clients, algorithm, **given, on_round=crash_after(2))
    loaded = Run.load(tmp_path, Tied())
    trained = checkpoint.reported(checkpoint.load(tmp_path))["a.weight"]
    assert torch.equal(loaded.model.a.weight, trained)
    assert loaded.model.a.weight is loaded.model.b.weight
    assert len(train(Tied(), clients, algorithm, **given).history) == 4


def test_a_checkpoint_that_is_not_the_sealed_one_is_not_gone_on_from(tmp_path):
    with pytest.raises(Interrupted):
        small_run(out=tmp_path, on_round=interrupt)
    last = checkpoint.load(tmp_path)
    state = checkpoint.state_from(last.tensors, last.progress.round, last.progress.radius)
    spoilt = {name: value * 0 for name, value in checkpoint.state_tensors(state).items()}
    forged = checkpoint.state_from(spoilt, last.progress.round, last.progress.radius)
    checkpoint.save(tmp_path, forged, last.progress)
    assert outcome(verify_run(tmp_path)) == "false"
    with pytest.raises(LedgerError, match="not the one that the ledger was sealed with"):
        small_run(out=tmp_path)


def test_buffers_that_no_state_dict_holds_are_frozen_too(tmp_path):
    def net(scale):
        made = nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))
        made.register_buffer("scale", torch.tensor(scale), persistent=False)
        return made

    with pytest.raises(Interrupted):
        small_run(model=net(1.0), out=tmp_path, on_round=interrupt)
    with pytest.raises(InputError, match="frozen parameters or buffers"):
        small_run(model=net(-5.0), out=tmp_path)


def test_each_of_two_runs_on_one_ledger_is_checked_by_its_own_charges_and_model(tmp_path):
    for name, seed in (("one", 0), ("two", 1)):
        small_run(out=tmp_path / name, ledger=tmp_path / "project.jsonl", seed=seed)
    for name in ("one", "two"):
        for file in ("project.jsonl", "project.jsonl.head"):
            target = tmp_path / name / file.replace("project", "ledger")
            target.write_bytes((tmp_path / file).read_bytes())
        wrong = [check.name for check in verify_run(tmp_path / name) if not check.passed]
        assert "model" not in wrong
        assert "checkpoint" not in wrong
    assert outcome(verify_run(tmp_path / "two")) == "holds"
