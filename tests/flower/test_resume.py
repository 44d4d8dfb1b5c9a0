"""After a crash at any point, a resumed run ends where an uninterrupted one does, and every release is paid for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord

from dpfedexp.accounting import Ledger
from dpfedexp.algorithms import cdp_fedexp, ldp_fedexp
from dpfedexp.core import step_size
from dpfedexp.engine import checkpoint, engine
from dpfedexp.engine.outlets import CHECKPOINT
from dpfedexp.errors import InputError, LedgerError
from dpfedexp.flower import DpFedExp
from dpfedexp.flower.monitor import read_status
from tests.optimizers import Adagrad

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
    return checkpoint.read_progress(folder).round


KILLED = {
    "adaptive": CDP,
    "an optimizer of one's own": replace(SAFE, server=Adagrad(floor=0.5)),
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
    resumed, result = run(tmp_path / "killed", **given)
    assert rounds_in(tmp_path / "killed") == rounds_in(tmp_path / "whole") == rounds
    assert torch.equal(resumed.state.w, whole.state.w)
    assert torch.equal(resumed.state.reported, whole.state.reported)
    assert resumed.state.radius == whole.state.radius
    for kept, other in ((whole.state.memory, resumed.state.memory), (whole.state.server, resumed.state.server)):
        assert all(torch.equal(other[key], value) for key, value in kept.items())
    shown, before = ([dict(one.train_metrics_clientapp[n]) for n in rounds] for one in (result, expected))
    assert shown == before, "history survives"
    steps = {line["eta_g"] for line in shown[2:]}
    assert name != "safe" or steps - {1.0, step_size.FIRST_CAP}, "the memory must matter for the comparison"


def test_a_local_round_that_was_sent_before_the_crash_stays_charged(tmp_path):
    """Its reports had left the clients; asking again draws new noise and costs again."""
    algorithm = ldp_fedexp(clip=0.5, noise_multiplier=1.0)
    with pytest.raises(Crash):
        run(tmp_path, algorithm, crash_at=3)
    run(tmp_path, algorithm)
    assert rounds_in(tmp_path) == [1, 2, 3, 3, 4]


@pytest.mark.parametrize(("module", "before"), [(engine, "advance"), (checkpoint, "save")])
def test_a_crash_between_charge_and_checkpoint_makes_the_round_again_and_charges_again(
    module, before, tmp_path, monkeypatch
):
    calls, original = [], getattr(module, before)

    def crash(*args, **kwargs):
        calls.append(args)
        if len(calls) == (2 if before == "advance" else 3):  # the first checkpoint is the starting point
            raise Crash
        return original(*args, **kwargs)

    killed = tmp_path / "killed"
    with monkeypatch.context() as patched:
        patched.setattr(module, before, crash)
        with pytest.raises(Crash):
            run(killed)
    assert read_status(killed) | {"round": 1, "status": "killed"} == read_status(killed)
    assert rounds_in(killed) == [1, 2]
    assert checkpointed(killed) == 1
    whole, _ = run(tmp_path / "whole")
    resumed, result = run(killed)
    assert rounds_in(killed) == [1, 2, 2, 3, 4]
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3, 4]
    assert torch.equal(resumed.state.w, whole.state.w)
    assert result.train_metrics_clientapp[4]["epsilon_total"] > whole.history[-1]["epsilon_total"]


def test_a_resumed_server_takes_the_model_from_its_folder_whatever_it_starts_with(tmp_path):
    whole, _ = run(tmp_path / "whole")
    with pytest.raises(Crash):
        run(tmp_path / "killed", crash_at=3)
    strategy = DpFedExp(CDP, clients=3, rounds=4, folder=tmp_path / "killed", noise=Silence, node_timeout=0.1)
    other = {name: value + 1.0 for name, value in problem(3)[1].state_dict().items()}
    strategy.start(grid_of(), ArrayRecord(other), timeout=1.0)
    assert torch.equal(strategy.state.w, whole.state.w)


@pytest.mark.filterwarnings("ignore::dpfedexp.errors.AdviceWarning")
@pytest.mark.parametrize("noise", [{"target_epsilon": 8.0}, {"noise_multiplier": 1.0}])
def test_other_rounds_are_refused_by_the_setting_that_was_changed(noise, tmp_path):
    """The refusal named evaluation.mechanism.noise and others that nobody has typed."""
    algorithm, given = cdp_fedexp(clip=0.5, **noise), {"evaluate": "numbers", "evaluate_every": 1}
    deploy(tmp_path, algorithm, grid_of(), rounds=2, noise=Silence, **given)
    with pytest.raises(InputError) as refused:
        deploy(tmp_path, algorithm, grid_of(), rounds=30, noise=Silence, **given)
    assert "is of another run: rounds is 30 here and 2 there. Resume" in str(refused.value)


def test_a_charged_run_without_its_checkpoint_is_refused_and_pays_for_nothing_more(tmp_path):
    algorithm = cdp_fedexp(clip=0.5, target_epsilon=8.0)
    deploy(tmp_path, algorithm, rounds=2)
    before = (tmp_path / "ledger.jsonl").read_bytes()
    (tmp_path / CHECKPOINT).unlink()
    with pytest.raises(LedgerError, match="its checkpoint is missing, so it can't be resumed"):
        deploy(tmp_path, algorithm, rounds=2)
    assert (tmp_path / "ledger.jsonl").read_bytes() == before
