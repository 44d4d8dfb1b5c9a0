"""Folders of runs that were stopped, killed, resumed, saved or tampered with say what is true."""

import json
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dpfedexp import Run, Stop, dp_fedavg
from dpfedexp.engine import checkpoint
from dpfedexp.engine.open_run import OpenRun
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.engine.stopping import Interrupted
from dpfedexp.engine.verify import outcome, verify_run
from dpfedexp.errors import LedgerError, RoundFailed
from tests.engine.small import ROUNDS, Crash, crash_after, forge, small_run

pytestmark = pytest.mark.usefixtures("untried")
interrupt = crash_after(2, KeyboardInterrupt)


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
    first = small_run(out=tmp_path, on_round=crash_after(2, Stop("enough", "test")))
    assert first.privacy.stopping == "test"
    again = small_run(out=tmp_path, budget=0.01)
    assert (again.privacy.stopping, again.privacy.epsilon_total) == ("test", first.privacy.epsilon_total)
    whole = small_run(out=tmp_path)
    assert (whole.privacy.stopping, len(whole.history)) == ("", ROUNDS)


@pytest.mark.parametrize("end", [KeyboardInterrupt, RoundFailed, ValueError])
def test_a_run_that_ends_before_its_first_round_claims_nothing_false(end, tmp_path):
    def callback(record): ...

    callback.on_train_begin = Mock(side_effect=end("client 7 has 12 rows"))
    with pytest.raises((end, Interrupted)):
        small_run(out=tmp_path, on_round=callback)
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


@pytest.mark.parametrize(("number", "stopped"), [(2, "see the log of the run."), (ROUNDS, None)])
def test_a_run_whose_callback_fails_is_unfinished_only_where_rounds_are_left_and_no_file_says_why(
    number, stopped, tmp_path
):
    """The error is of a kind whose own sentences are written."""
    with pytest.raises(RoundFailed):
        small_run(out=tmp_path, on_round=crash_after(number, RoundFailed("client 7 has 12 rows")))
    status, facts = ((tmp_path / name).read_text() for name in ("status.json", "run.json"))
    assert "12 rows" not in status + facts
    assert json.loads(facts).get("stopped") == stopped
    assert json.loads(status)["status"] == "failed"


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
    with pytest.raises(Crash):
        small_run(model=Tied(), out=tmp_path, on_round=crash_after(2))
    loaded = Run.load(tmp_path, Tied())
    trained = checkpoint.reported(checkpoint.load(tmp_path))["a.weight"]
    assert torch.equal(loaded.model.a.weight, trained)
    assert loaded.model.a.weight is loaded.model.b.weight
    assert len(small_run(model=Tied(), out=tmp_path).history) == ROUNDS


def test_a_checkpoint_that_is_not_the_sealed_one_is_not_gone_on_from(tmp_path):
    with pytest.raises(Interrupted):
        small_run(out=tmp_path, on_round=interrupt)
    forge(tmp_path, {name: value * 0 for name, value in load_file(tmp_path / CHECKPOINT).items()})
    assert outcome(verify_run(tmp_path)) == "false"
    with pytest.raises(LedgerError, match="not the one that the ledger was sealed with"):
        small_run(out=tmp_path)
