"""After a crash at any point, a resumed run ends where an uninterrupted one does, and every release is paid for."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord
from safetensors.torch import load_file

from dpfedexp import train
from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import cdp_fedexp, dp_fedadam, ldp_fedexp
from dpfedexp.core import step_size
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.core.local import Sgd
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.flower import DpFedExp
from dpfedexp.flower import client as mod
from dpfedexp.flower import store as saving
from dpfedexp.flower import strategy as server
from dpfedexp.flower.monitor import read_status
from dpfedexp.flower.nodes import exchange
from dpfedexp.flower.store import load_checkpoint
from tests.optimisers import Adagrad

from .app_folder import ALMOST_NO_NOISE
from .loopback import LoopbackGrid, plain_app, problem
from .test_agreement import Silence

LOCAL = Sgd(lr=0.05, steps=5)
CDP = cdp_fedexp(clip="adaptive", noise_multiplier=1.0)


class Crash(BaseException):
    """The process is gone: nothing of this library may catch it and go on."""


@pytest.fixture(autouse=True)
def silent(monkeypatch):
    monkeypatch.setattr(mod, "deployment_noise", Silence)


def run(folder, algorithm=CDP, rounds=4, resume=False, grid=None):
    federation, model = problem(3)
    strategy = DpFedExp(
        algorithm, clients=3, rounds=rounds, folder=folder, resume=resume, node_timeout=0.1, noise=Silence
    )
    result = strategy.start(
        grid or LoopbackGrid(plain_app(federation, model, LOCAL), 3), ArrayRecord(model.state_dict()), timeout=1
    )
    return strategy, result


def rounds_in(folder) -> list[int]:
    return [entry.round for entry in Ledger.open(folder / "ledger.jsonl", read_only=True).entries]


class CrashingGrid(LoopbackGrid):
    """The server dies while it waits for the replies of one round."""

    def __init__(self, at: int) -> None:
        federation, model = problem(3)
        super().__init__(plain_app(federation, model, LOCAL), 3)
        self.at = at

    def pull_messages(self, message_ids):
        if len(self.sent) == 3 * self.at:
            raise Crash
        return super().pull_messages(message_ids)


KILLED = {
    "adaptive": CDP,
    "adam": dp_fedadam(clip=0.5, noise_multiplier=1.0),
    "safe": cdp_fedexp(clip=0.5, noise_multiplier=1.0),
}


@pytest.mark.parametrize("name", KILLED)
def test_a_run_killed_while_it_waits_resumes_to_the_same_model_memory_and_ledger(name, tmp_path):
    rounds = list(range(1, 8 if name == "safe" else 5))
    given = {"algorithm": KILLED[name], "rounds": len(rounds)}
    whole, expected = run(tmp_path / "whole", **given)
    with pytest.raises(Crash):
        run(tmp_path / "killed", **given, grid=CrashingGrid(at=3))
    assert rounds_in(tmp_path / "killed") == [1, 2]
    resumed, result = run(tmp_path / "killed", **given, resume=True)
    assert rounds_in(tmp_path / "killed") == rounds_in(tmp_path / "whole") == rounds
    assert torch.equal(resumed.state.w, whole.state.w)
    assert torch.equal(resumed.state.reported, whole.state.reported)
    assert resumed.state.radius == whole.state.radius
    assert all(torch.equal(resumed.state.memory[key], value) for key, value in whole.state.memory.items())
    shown, before = ([dict(one.train_metrics_clientapp[n]) for n in rounds] for one in (result, expected))
    assert shown == before, "history survives"
    steps = {line["eta_g"] for line in shown[2:]}
    assert name != "safe" or steps - {1.0, step_size.FIRST}, (
        "the memory must matter for the comparison to mean anything"
    )


@pytest.mark.parametrize(
    ("began", "goes_on", "what"),
    [
        ({"clip": 0.5, "step": "paper"}, {"clip": 0.5, "step": "safe"}, "step 'paper', but this one has 'safe'"),
        # Noise as long as the clip, or longer, takes the least quantile.
        ({"clip": AdaptiveClip()}, {"clip": "adaptive"}, r"quantile 0\.5, but this one has 0\.2"),
    ],
    ids=["step", "quantile"],
)
def test_a_run_does_not_go_on_with_another_step_or_quantile(began, goes_on, what, tmp_path):
    with pytest.raises(Crash):
        run(tmp_path, cdp_fedexp(noise_multiplier=1.0, **began), grid=CrashingGrid(at=3))
    with pytest.raises(InputError, match=f"has {what}; resume with the same"):
        run(tmp_path, cdp_fedexp(noise_multiplier=1.0, **goes_on), resume=True)


def test_a_local_round_that_was_sent_before_the_crash_stays_charged(tmp_path):
    """Its reports had left the clients; asking again draws new noise and costs again."""
    algorithm = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
    with pytest.raises(Crash):
        run(tmp_path, algorithm, grid=CrashingGrid(at=3))
    run(tmp_path, algorithm, resume=True)
    assert rounds_in(tmp_path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize(("module", "before"), [(server, "advance"), (saving, "save_checkpoint")])
def test_a_crash_between_charge_and_checkpoint_makes_the_round_again_and_charges_again(
    module, before, tmp_path, monkeypatch
):
    calls = []

    def crash(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise Crash
        return original(*args, **kwargs)

    original = getattr(module, before)
    monkeypatch.setattr(module, before, crash)
    with pytest.raises(Crash):
        run(tmp_path / "killed")
    monkeypatch.setattr(module, before, original)
    assert read_status(tmp_path / "killed") | {"round": 1, "status": "failed"} == read_status(tmp_path / "killed")
    assert rounds_in(tmp_path / "killed") == [1, 2]
    assert json.loads((tmp_path / "killed" / "checkpoint.json").read_text())["round"] == 1
    whole, _ = run(tmp_path / "whole")
    resumed, result = run(tmp_path / "killed", resume=True)
    assert rounds_in(tmp_path / "killed") == [1, 2, 2, 3, 4]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert torch.equal(resumed.state.w, whole.state.w)
    assert result.train_metrics_clientapp[4]["epsilon_total"] > whole.history[-1]["epsilon_total"]


def test_a_finished_run_that_is_resumed_asks_nobody_and_charges_nothing(tmp_path):
    first, _ = run(tmp_path)
    grid = CrashingGrid(at=99)
    again, _ = run(tmp_path, resume=True, grid=grid)
    assert grid.sent == []
    assert rounds_in(tmp_path) == [1, 2, 3, 4]
    assert torch.equal(first.state.w, again.state.w)


@pytest.mark.parametrize("number", [3, 4])
def test_resume_of_a_damaged_checkpoint_is_refused(number, tmp_path):
    """The newest parameters, and those of the round before, which the reported model averages."""
    run(tmp_path)
    tensors = tmp_path / f"round-{number}.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match="is damaged"):
        run(tmp_path, resume=True)


def test_parameters_are_written_once_and_lie_there_while_they_are_averaged(tmp_path):
    strategy, _ = run(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("round-*.safetensors"))
    assert names == ["round-3.safetensors", "round-4.safetensors"]
    before, newest = (load_file(tmp_path / name) for name in names)
    assert not any(name.startswith("recent.") for name in newest)
    assert torch.equal(before["w"], strategy.state.recent[0])
    assert torch.equal(newest["w"], strategy.state.recent[1])
    state = load_checkpoint(tmp_path).state
    assert len(state.recent) == 2
    assert all(torch.equal(a, b) for a, b in zip(state.recent, strategy.state.recent, strict=True))


def test_two_servers_cannot_use_one_folder_at_once(tmp_path):
    run(tmp_path, rounds=1)
    with (
        Ledger.open(tmp_path / "ledger.jsonl"),
        pytest.raises(LedgerError, match="in use by another run"),
    ):
        run(tmp_path, rounds=1, resume=True)


def test_resume_in_an_empty_folder_starts_from_the_beginning(tmp_path):
    run(tmp_path, resume=True)
    assert rounds_in(tmp_path) == [1, 2, 3, 4]


def test_no_round_is_charged_before_the_files_of_the_one_before_are_on_disk(tmp_path, monkeypatch):
    """However long they take; and the last round's are there when the run ends."""
    events, charge, save = [], Ledger.charge, saving.save_checkpoint

    def slow(folder, checkpoint, kept):
        time.sleep(0.3)
        done = save(folder, checkpoint, kept)
        events.append(("saved", checkpoint.state.round))
        return done

    def charged(self, number, *args, **kwargs):
        events.append(("charged", number))
        return charge(self, number, *args, **kwargs)

    monkeypatch.setattr(saving, "save_checkpoint", slow)
    monkeypatch.setattr(Ledger, "charge", charged)
    run(tmp_path, rounds=3)
    assert events == [(what, number) for number in (1, 2, 3) for what in ("charged", "saved")]


@pytest.mark.parametrize("at", [2, 4])
def test_a_checkpoint_that_cannot_be_written_stops_the_run_before_another_charge(at, tmp_path, monkeypatch):
    save = saving.save_checkpoint

    def full(folder, checkpoint, kept):
        if checkpoint.state.round == at:
            raise OSError(28, "No space left on device")
        return save(folder, checkpoint, kept)

    monkeypatch.setattr(saving, "save_checkpoint", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    assert rounds_in(tmp_path) == list(range(1, at + 1))
    status = read_status(tmp_path)
    assert (status["status"], status["round"]) == ("failed", at - 1)
    monkeypatch.setattr(saving, "save_checkpoint", save)
    resumed, _ = run(tmp_path, resume=True)
    assert rounds_in(tmp_path) == [*range(1, at + 1), *range(at, 5)]
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4]


def test_files_beside_the_checkpoint_that_cannot_be_written_leave_the_round_complete(tmp_path, monkeypatch):
    """Status and checkpoint name the same round, and the one that follows is not made twice."""
    write = server.write_results

    def full(folder, model, statement, advice=()):
        if len(statement_rounds) == 2:
            statement_rounds.append(0)
            raise OSError(28, "No space left on device")
        statement_rounds.append(0)
        write(folder, model, statement, advice)

    statement_rounds: list[int] = []
    monkeypatch.setattr(server, "write_results", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path)
    done = json.loads((tmp_path / "checkpoint.json").read_text())["round"]
    status = read_status(tmp_path)
    assert (status["status"], status["round"]) == ("failed", done)
    run(tmp_path, resume=True)
    assert rounds_in(tmp_path) == [1, 2, 3, 4]


def test_an_interrupt_while_files_are_written_waits_for_them(tmp_path, monkeypatch):
    """A writer that went on behind a closed ledger would write over what the next process writes."""
    save = saving.save_checkpoint

    def interrupting(folder, checkpoint, kept):
        if checkpoint.state.round == 2:
            time.sleep(0.3)
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.5)
        return save(folder, checkpoint, kept)

    monkeypatch.setattr(saving, "save_checkpoint", interrupting)
    # Whoever starts the tests in the background has them ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    status = read_status(tmp_path)
    assert (status["status"], status["round"]) == ("failed", 2)
    assert json.loads((tmp_path / "checkpoint.json").read_text())["round"] == 2
    resumed, _ = run(tmp_path, resume=True)
    assert rounds_in(tmp_path) == [1, 2, 3, 4]
    assert resumed.state.round == 4


def test_rounds_without_start_end_with_finish(tmp_path):
    federation, model = problem(3)
    strategy = DpFedExp(CDP, clients=3, rounds=2, folder=tmp_path, node_timeout=0.1, noise=Silence)
    arrays, grid = ArrayRecord(model.state_dict()), LoopbackGrid(plain_app(federation, model, LOCAL), 3)
    strategy.begin(arrays)
    for number in (1, 2):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        strategy.aggregate_train(number, exchange(grid, messages, 1))
    strategy.finish()
    assert json.loads((tmp_path / "checkpoint.json").read_text())["round"] == 2
    assert (tmp_path / "model.safetensors").exists()


ALGORITHM = replace(cdp_fedexp(clip=0.5, noise_multiplier=ALMOST_NO_NOISE, average_last=1), server=Adagrad(floor=0.5))


def run_adagrad(folder, rounds=4, crash_at=None, **options):
    federation, model = problem(3)

    def lost(message, reply):
        if message.metadata.group_id == str(crash_at):
            raise Crash
        return reply

    grid = LoopbackGrid(plain_app(federation, model, LOCAL), 3, reply_of=lost)
    strategy = DpFedExp(ALGORITHM, clients=3, rounds=rounds, folder=folder, node_timeout=1, **options)
    strategy.start(grid, ArrayRecord(model.state_dict()), timeout=5)
    return strategy


def test_rounds_equal_the_simulators_and_a_run_that_was_killed_ends_where_it_would_have(tmp_path):
    """Float32 messages: 2e-5 after four rounds. The noise is fresh in both runs, and a billionth of the clip."""
    whole = run_adagrad(tmp_path / "whole")
    federation, model = problem(3)
    simulated = train(model, federation, ALGORITHM, local=LOCAL, rounds=4, progress=False, device="cpu")
    expected = torch.cat([p.detach().flatten() for p in simulated.model.parameters()])
    torch.testing.assert_close(whole.state.w.float(), expected, rtol=2e-5, atol=2e-5)
    assert max(record["eta_g"] for record in simulated.history) > 1.2, "the step size is not 1, so it counts"
    with pytest.raises(Crash):
        run_adagrad(tmp_path / "killed", crash_at=3)
    resumed = run_adagrad(tmp_path / "killed", resume=True)
    torch.testing.assert_close(resumed.state.w, whole.state.w, rtol=0.0, atol=1e-6)
    assert set(resumed.state.server) == {"squares", "rounds"}
    assert float(resumed.state.server["rounds"]) == 4.0
