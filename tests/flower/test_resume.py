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

from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import cdp_fedexp, dp_fedadam, ldp_fedexp
from dpfedexp.core import step_size
from dpfedexp.core.clipping import AdaptiveClip
from dpfedexp.errors import InputError
from dpfedexp.flower import DpFedExp
from dpfedexp.flower import store as saving
from dpfedexp.flower import strategy as server
from dpfedexp.flower.monitor import read_status
from dpfedexp.flower.nodes import exchange
from dpfedexp.flower.store import load_checkpoint
from tests.optimisers import Adagrad

from .loopback import Crash, Silence, deploy, grid_of, problem

CDP = cdp_fedexp(clip="adaptive", noise_multiplier=1.0)
SAFE = cdp_fedexp(clip=0.5, noise_multiplier=1.0)
pytestmark = pytest.mark.usefixtures("silent")


def run(folder, algorithm=CDP, rounds=4, crash_at=None, **options):
    """`crash_at`: the server dies while it waits for the replies of this round."""

    def lost(message, reply):
        if message.metadata.group_id == str(crash_at) and message.metadata.dst_node_id == 3:
            raise Crash
        return reply

    return deploy(folder, algorithm, grid_of(reply_of=lost), rounds=rounds, noise=Silence, **options)


def rounds_in(folder) -> list[int]:
    return [entry.round for entry in Ledger.open(folder / "ledger.jsonl", read_only=True).entries]


def checkpointed(folder) -> int:
    return json.loads((folder / "checkpoint.json").read_text())["round"]


KILLED = {
    "adaptive": CDP,
    "adam": dp_fedadam(clip=0.5, noise_multiplier=1.0),
    "an optimiser of one's own": replace(SAFE, server=Adagrad(floor=0.5)),
    "safe": SAFE,
}


@pytest.mark.parametrize("name", KILLED)
def test_a_run_killed_while_it_waits_resumes_to_the_same_model_memory_and_ledger(name, tmp_path):
    rounds = list(range(1, 8 if name == "safe" else 5))
    given = {"algorithm": KILLED[name], "rounds": len(rounds)}
    whole, expected = run(tmp_path / "whole", **given)
    with pytest.raises(Crash):
        run(tmp_path / "killed", **given, crash_at=3)
    assert rounds_in(tmp_path / "killed") == [1, 2]
    resumed, result = run(tmp_path / "killed", **given, resume=True)
    assert rounds_in(tmp_path / "killed") == rounds_in(tmp_path / "whole") == rounds
    assert torch.equal(resumed.state.w, whole.state.w)
    assert torch.equal(resumed.state.reported, whole.state.reported)
    assert resumed.state.radius == whole.state.radius
    for kept, other in ((whole.state.memory, resumed.state.memory), (whole.state.server, resumed.state.server)):
        assert all(torch.equal(other[key], value) for key, value in kept.items())
    shown, before = ([dict(one.train_metrics_clientapp[n]) for n in rounds] for one in (result, expected))
    assert shown == before, "history survives"
    steps = {line["eta_g"] for line in shown[2:]}
    assert name != "safe" or steps - {1.0, step_size.FIRST}, "the memory must matter for the comparison"


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
        run(tmp_path, cdp_fedexp(noise_multiplier=1.0, **began), crash_at=3)
    with pytest.raises(InputError, match=f"has {what}; resume with the same"):
        run(tmp_path, cdp_fedexp(noise_multiplier=1.0, **goes_on), resume=True)


def test_a_local_round_that_was_sent_before_the_crash_stays_charged(tmp_path):
    """Its reports had left the clients; asking again draws new noise and costs again."""
    algorithm = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
    with pytest.raises(Crash):
        run(tmp_path, algorithm, crash_at=3)
    run(tmp_path, algorithm, resume=True)
    assert rounds_in(tmp_path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize(("module", "before"), [(server, "advance"), (saving, "save_checkpoint")])
def test_a_crash_between_charge_and_checkpoint_makes_the_round_again_and_charges_again(
    module, before, tmp_path, monkeypatch
):
    calls, original = [], getattr(module, before)

    def crash(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise Crash
        return original(*args, **kwargs)

    killed = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(module, before, crash)
        with pytest.raises(Crash):
            run(killed)
    assert read_status(killed) | {"round": 1, "status": "failed"} == read_status(killed)
    assert rounds_in(killed) == [1, 2]
    assert checkpointed(killed) == 1
    whole, _ = run(tmp_path / "whole")
    resumed, result = run(killed, resume=True)
    assert rounds_in(killed) == [1, 2, 2, 3, 4]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert torch.equal(resumed.state.w, whole.state.w)
    assert result.train_metrics_clientapp[4]["epsilon_total"] > whole.history[-1]["epsilon_total"]


@pytest.mark.parametrize("number", [3, 4])
def test_resume_of_a_damaged_checkpoint_is_refused(number, tmp_path):
    """The newest parameters, and those of the round before, which the reported model averages."""
    run(tmp_path)
    tensors = tmp_path / f"round-{number}.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match="is damaged"):
        run(tmp_path, resume=True)


def test_parameters_are_written_once_and_a_finished_run_that_is_resumed_asks_nobody(tmp_path):
    first, _ = run(tmp_path)
    names = sorted(path.name for path in tmp_path.glob("round-*.safetensors"))
    assert names == ["round-3.safetensors", "round-4.safetensors"]
    before, newest = (load_file(tmp_path / name) for name in names)
    assert not any(name.startswith("recent.") for name in newest)
    assert [torch.equal(*pair) for pair in zip((before["w"], newest["w"]), first.state.recent, strict=True)] == [
        True
    ] * 2
    loaded = load_checkpoint(tmp_path).state.recent
    assert all(torch.equal(a, b) for a, b in zip(loaded, first.state.recent, strict=True))
    again, _ = run(tmp_path, resume=True, crash_at=4)
    assert rounds_in(tmp_path) == [1, 2, 3, 4]
    assert torch.equal(first.state.w, again.state.w)


def test_no_round_is_charged_before_the_files_of_the_one_before_are_on_disk(tmp_path, monkeypatch):
    """However long they take; and the last round's are there when the run ends. One that is resumed from nothing begins."""
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
    run(tmp_path, rounds=3, resume=True)
    assert events == [(what, number) for number in (1, 2, 3) for what in ("charged", "saved")]


@pytest.mark.parametrize(
    ("module", "write", "at", "done"),
    [(saving, "save_checkpoint", 2, 1), (saving, "save_checkpoint", 4, 3), (server, "write_results", 3, 2)],
    ids=["checkpoint", "last checkpoint", "files beside it"],
)
def test_files_that_cannot_be_written_stop_the_run_before_another_charge(
    module, write, at, done, tmp_path, monkeypatch
):
    """Status and checkpoint name the same round. One that has a checkpoint is not made twice, whatever its other files."""
    original, calls = getattr(module, write), []

    def full(*args):
        calls.append(args)
        if len(calls) == at:
            raise OSError(28, "No space left on device")
        return original(*args)

    with monkeypatch.context() as patched:
        patched.setattr(module, write, full)
        with pytest.raises(OSError, match="No space left"):
            run(tmp_path)
    charged, status = rounds_in(tmp_path), read_status(tmp_path)
    assert charged == list(range(1, (at if write == "save_checkpoint" else done) + 1))
    assert (status["status"], status["round"], checkpointed(tmp_path)) == ("failed", done, done)
    resumed, _ = run(tmp_path, resume=True)
    assert rounds_in(tmp_path) == [*charged, *range(done + 1, 5)]
    assert [line["round"] for line in resumed.history] == [1, 2, 3, 4]


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
    # Tests that were started in the background ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    status = read_status(tmp_path)
    assert (status["status"], status["round"], checkpointed(tmp_path)) == ("failed", 2, 2)
    resumed, _ = run(tmp_path, resume=True)
    assert rounds_in(tmp_path) == [1, 2, 3, 4]
    assert resumed.state.round == 4


def test_rounds_without_start_end_with_finish_and_a_resumed_server_watches_them_too(tmp_path):
    given = {"clients": 3, "rounds": 4, "folder": tmp_path, "node_timeout": 0.1, "noise": Silence}
    strategy, arrays, grid = DpFedExp(CDP, **given), ArrayRecord(problem(3)[1].state_dict()), grid_of()
    strategy.begin(arrays)
    for number in (1, 2):
        messages = strategy.configure_train(number, arrays, ConfigRecord(), grid)
        strategy.aggregate_train(number, exchange(grid, messages, 1))
    strategy.finish()
    assert checkpointed(tmp_path) == 2
    assert (tmp_path / "model.safetensors").exists()
    resumed, _ = run(tmp_path, resume=True)
    assert len(resumed.commentary.watch._records) == 4
