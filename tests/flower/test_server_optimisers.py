"""A server optimiser of one's own in a federation: the simulator's rounds, and a resumed run that remembers."""

from dataclasses import replace

import pytest
import torch
from flwr.app import ArrayRecord

from dpfedexp import Sgd, cdp_fedexp, train
from dpfedexp.flower import DpFedExp
from tests.optimisers import Adagrad

from .app_folder import ALMOST_NO_NOISE
from .loopback import LoopbackGrid, plain_app, problem

LOCAL = Sgd(lr=0.05, steps=5)
ALGORITHM = replace(cdp_fedexp(clip=0.5, noise_multiplier=ALMOST_NO_NOISE, average_last=1), server=Adagrad(floor=0.5))


class Crash(BaseException):
    pass


def run(folder, rounds=4, crash_at=None, **options):
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
    whole = run(tmp_path / "whole")
    federation, model = problem(3)
    simulated = train(model, federation, ALGORITHM, local=LOCAL, rounds=4, progress=False, device="cpu")
    expected = torch.cat([p.detach().flatten() for p in simulated.model.parameters()])
    torch.testing.assert_close(whole.state.w.float(), expected, rtol=2e-5, atol=2e-5)
    assert max(record["eta_g"] for record in simulated.history) > 1.2, "the step size is not 1, so it counts"
    with pytest.raises(Crash):
        run(tmp_path / "killed", crash_at=3)
    resumed = run(tmp_path / "killed", resume=True)
    torch.testing.assert_close(resumed.state.w, whole.state.w, rtol=0.0, atol=1e-6)
    assert set(resumed.state.server) == {"squares", "rounds"}
    assert float(resumed.state.server["rounds"]) == 4.0
