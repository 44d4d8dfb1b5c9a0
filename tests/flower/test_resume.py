"""After a crash at any point, a resumed run ends where an uninterrupted one does and never releases a round twice."""

from __future__ import annotations

import json

import pytest
import torch
from flwr.app import ArrayRecord

from dpfedexp import files, step_size
from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import cdp_fedexp, dp_fedadam, dp_fedavg, ldp_fedexp
from dpfedexp.clipping import AdaptiveClip
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.flower import DpFedExp
from dpfedexp.flower.node import mod
from dpfedexp.flower.server import strategy as server
from dpfedexp.local import Sgd

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


@pytest.mark.parametrize("algorithm", [CDP, dp_fedadam(clip=0.5, noise_multiplier=1.0)], ids=["adaptive", "adam"])
def test_a_run_killed_while_it_waits_resumes_to_the_same_model_and_ledger(algorithm, tmp_path):
    whole, expected = run(tmp_path / "whole", algorithm)
    with pytest.raises(Crash):
        run(tmp_path / "killed", algorithm, grid=CrashingGrid(at=3))
    assert rounds_in(tmp_path / "killed") == [1, 2]
    resumed, result = run(tmp_path / "killed", algorithm, resume=True)
    assert rounds_in(tmp_path / "killed") == rounds_in(tmp_path / "whole") == [1, 2, 3, 4]
    assert torch.equal(resumed.state.w, whole.state.w)
    assert torch.equal(resumed.state.reported, whole.state.reported)
    assert resumed.state.radius == whole.state.radius
    assert dict(result.train_metrics_clientapp[2]) == dict(expected.train_metrics_clientapp[2]), "history survives"


SAFE = {
    "central": cdp_fedexp(clip=0.5, noise_multiplier=1.0),
    "local": ldp_fedexp(clip=0.5, noise_multiplier=1.0),
}


@pytest.mark.parametrize("name", SAFE)
def test_the_safe_steps_memory_survives_a_crash(name, tmp_path):
    whole, expected = run(tmp_path / "whole", SAFE[name], rounds=7)
    with pytest.raises(Crash):
        run(tmp_path / "killed", SAFE[name], rounds=7, grid=CrashingGrid(at=3))
    resumed, result = run(tmp_path / "killed", SAFE[name], rounds=7, resume=True)
    assert torch.equal(resumed.state.w, whole.state.w)
    assert all(torch.equal(resumed.state.memory[key], value) for key, value in whole.state.memory.items())
    steps = [[one.train_metrics_clientapp[n]["eta_g"] for n in range(1, 8)] for one in (result, expected)]
    assert steps[0] == steps[1]
    assert set(steps[0][2:]) - {1.0, step_size.FIRST}, "the memory must matter for the comparison to mean anything"


@pytest.mark.parametrize(("began", "goes_on"), [("paper", "safe"), ("safe", "paper")])
def test_a_run_does_not_go_on_with_another_step(began, goes_on, tmp_path):
    steps = {step: cdp_fedexp(clip=0.5, noise_multiplier=1.0, step=step) for step in ("paper", "safe")}
    with pytest.raises(Crash):
        run(tmp_path, steps[began], grid=CrashingGrid(at=3))
    with pytest.raises(InputError, match=rf"has step '{began}', but this one has '{goes_on}'; resume with the same"):
        run(tmp_path, steps[goes_on], resume=True)


def test_a_run_does_not_go_on_with_another_quantile(tmp_path):
    median, chosen = (cdp_fedexp(clip=clip, noise_multiplier=1.0) for clip in (AdaptiveClip(), "adaptive"))
    with pytest.raises(Crash):
        run(tmp_path, median, grid=CrashingGrid(at=3))
    # Noise as long as the clip, or longer, takes the least quantile.
    with pytest.raises(InputError, match=r"has quantile 0\.5, but this one has 0\.2; resume with the same"):
        run(tmp_path, chosen, resume=True)


def test_a_local_round_that_was_sent_before_the_crash_stays_charged(tmp_path):
    """Its reports had left the clients; asking again draws new noise and costs again."""
    algorithm = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
    with pytest.raises(Crash):
        run(tmp_path, algorithm, grid=CrashingGrid(at=3))
    run(tmp_path, algorithm, resume=True)
    assert rounds_in(tmp_path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize("before", ["advance", "save_checkpoint"])
def test_a_crash_between_charge_and_checkpoint_releases_nothing_and_charges_again(before, tmp_path, monkeypatch):
    calls = []

    def crash(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise Crash
        return original(*args, **kwargs)

    original = getattr(server, before)
    monkeypatch.setattr(server, before, crash)
    with pytest.raises(Crash):
        run(tmp_path / "killed")
    monkeypatch.setattr(server, before, original)
    assert rounds_in(tmp_path / "killed") == [1, 2]
    assert json.loads((tmp_path / "killed" / "checkpoint.json").read_text())["round"] == 1
    whole, _ = run(tmp_path / "whole")
    resumed, result = run(tmp_path / "killed", resume=True)
    assert rounds_in(tmp_path / "killed") == [1, 2, 2, 3, 4]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert torch.equal(resumed.state.w, whole.state.w)
    assert result.train_metrics_clientapp[4]["epsilon_total"] > whole.history[-1]["epsilon_total"]


def test_a_crash_while_the_checkpoint_is_written_leaves_the_previous_one_whole(tmp_path, monkeypatch):
    original, calls = files.os.replace, []

    def crash(source, target):
        if str(target).endswith("checkpoint.json"):
            calls.append(target)
            if len(calls) == 3:
                raise Crash
        return original(source, target)

    monkeypatch.setattr(files.os, "replace", crash)
    with pytest.raises(Crash):
        run(tmp_path / "killed")
    monkeypatch.setattr(files.os, "replace", original)
    resumed, _ = run(tmp_path / "killed", resume=True)
    whole, _ = run(tmp_path / "whole")
    assert torch.equal(resumed.state.w, whole.state.w)


def test_a_finished_run_that_is_resumed_asks_nobody_and_charges_nothing(tmp_path):
    first, _ = run(tmp_path)
    grid = CrashingGrid(at=99)
    again, _ = run(tmp_path, resume=True, grid=grid)
    assert grid.sent == []
    assert rounds_in(tmp_path) == [1, 2, 3, 4]
    assert torch.equal(first.state.w, again.state.w)


def test_resume_with_other_settings_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(InputError, match="resume with the same settings"):
        run(tmp_path, dp_fedavg(clip=0.5, noise_multiplier=1.0), resume=True)


def test_resume_of_a_damaged_checkpoint_is_refused(tmp_path):
    run(tmp_path)
    tensors = next(tmp_path.glob("round-*.safetensors"))
    tensors.write_bytes(tensors.read_bytes()[:-1] + b"x")
    with pytest.raises(InputError, match="is damaged"):
        run(tmp_path, resume=True)


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
